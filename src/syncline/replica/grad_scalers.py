"""Watch a GradScaler: when it is about to look at gradients, and when it has updated its scale.

A scaler has no hooks, so its class is replaced by one that tells listeners. Copies of the scaler have none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch.amp import GradScaler
from torch.optim import Optimizer


@dataclass(frozen=True, eq=False)
class ScalerListener:
    """What is told of a scaler."""

    before_unscale: Callable[[Optimizer], None]  # it is about to look at the gradients of an optimizer
    after_unscale: Callable[[], None]  # it has divided them by its scale
    after_step: Callable[[Optimizer], None]  # it has let an optimizer make its step, or has left it out
    after_update: Callable[[], None]  # the scale has been updated, after a step that was made or left out


_listeners: WeakKeyDictionary[GradScaler, list[ScalerListener]] = WeakKeyDictionary()


def watched_class(kind: type[GradScaler]) -> type[GradScaler]:
    """The class of a scaler with listeners."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        def unscale_(self, optimizer: Optimizer) -> None:
            for listener in _listeners.get(self, []):
                listener.before_unscale(optimizer)
            super().unscale_(optimizer)
            for listener in _listeners.get(self, []):
                listener.after_unscale()

        def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
            for listener in _listeners.get(self, []):
                listener.before_unscale(optimizer)
            made: float | None = super().step(optimizer, *args, **kwargs)
            for listener in _listeners.get(self, []):
                listener.after_step(optimizer)
            return made

        def update(self, new_scale: Any = None) -> None:
            super().update(new_scale)
            for listener in _listeners.get(self, []):
                listener.after_update()

        def __reduce_ex__(self, protocol: Any) -> Any:
            return blank, (kind,), self.__getstate__()

    Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Watched


def blank(kind: type[GradScaler]) -> GradScaler:
    """A scaler of a class, without what it is made of: copies and files have no listeners."""
    return kind.__new__(kind)


def watch_scaler(scaler: GradScaler, listener: ScalerListener) -> Callable[[], None]:
    """Tell a listener of a scaler; returns what ends that."""
    if scaler not in _listeners:
        _listeners[scaler] = []
        scaler.__class__ = watched_class(type(scaler))
    _listeners[scaler].append(listener)
    return partial(remove, scaler, listener)


def remove(scaler: GradScaler, listener: ScalerListener) -> None:
    """Let go of the scaler with the last listener."""
    _listeners[scaler].remove(listener)
    if not _listeners[scaler]:
        del _listeners[scaler]
        scaler.__class__ = type(scaler).__mro__[1]


def stepping_scaler() -> GradScaler | None:
    """The enabled scaler whose `step` this thread is in, if it is in any."""
    frame = sys._getframe(1)
    code = GradScaler.step.__code__
    while frame.f_back is not None:
        if frame.f_code is code:
            scaler: GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back
    return None
