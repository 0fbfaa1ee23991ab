"""The fabric in use: what `fabric="auto"` finds.

Each thread that is a rank has its own; beside those there is one for the process, set by `init`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.fabric.base import Fabric


class _Current(threading.local):
    fabric: Fabric | None = None


_of_thread = _Current()
_of_process: list[Fabric] = []


@contextmanager
def using(fabric: Fabric) -> Iterator[Fabric]:
    """Make `fabric` the current one of this thread."""
    before = _of_thread.fabric
    _of_thread.fabric = fabric
    try:
        yield fabric
    finally:
        _of_thread.fabric = before


def use_in_process(fabric: Fabric) -> None:
    """Make `fabric` the current one of every thread that has none of its own."""
    _of_process[:] = [fabric]


def current() -> Fabric | None:
    """The fabric of this thread, else of this process, else None."""
    return _of_thread.fabric or (_of_process[0] if _of_process else None)


def resolve(fabric: str | Fabric) -> Fabric:
    """The fabric that was given, or the current one for `"auto"`."""
    if not isinstance(fabric, str):
        return fabric
    if fabric != "auto":
        raise ConfigError(f'fabric={fabric!r} is neither a fabric nor "auto"')
    found = current()
    if found is None:
        raise ConfigError("there is no fabric yet; call syncline.init() first, or run inside syncline.run()")
    return found
