"""The fabric in use: what `fabric="auto"` finds.

Each thread that is a rank has its own; beside those there is one for the process, set by `init`. A fabric whose process
group was destroyed, or replaced by another, is not in use any more.
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
    """Make `fabric` the current one of every thread that has none of its own, and close one whose group is gone."""
    before, _of_process[:] = _of_process[:], [fabric]
    for one in before:
        if one.outlived:
            one.close(drain=False)


def current() -> Fabric | None:
    """The fabric of this thread, else of this process, else None."""
    inside = of_run()
    if inside is not None and not inside.outlived:
        return inside
    return next((one for one in _of_process if not one.outlived and not one.is_closed), None)


def latest() -> Fabric | None:
    """The fabric that was the current one last, though its process group may be gone, or it may be closed."""
    return next(iter(_of_process), of_run())


def of_run() -> Fabric | None:
    """The fabric that `run` has given to this thread."""
    return _of_thread.fabric


def refuse_outlived(fabric: Fabric) -> None:
    """Ranks may have been counted anew since, or be others."""
    if fabric.outlived:
        raise ConfigError(
            f"this fabric was made for rank {fabric.rank} of {fabric.world}, before the process group was destroyed or "
            f"another was made; close what was made on it, call syncline.init(), and make a new Sync"
        )


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
