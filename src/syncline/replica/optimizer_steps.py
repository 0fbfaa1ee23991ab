"""Around `optimizer.step()`: what comes before and after a step, a step that is not to be made, and unknown optimizers.

torch calls hooks before and after a step, but a hook cannot keep the step from being made: an optimizer that reads
`p.grad` would find None. So the optimizer's `step` is replaced as well, as torch's schedulers replace it. A hook that
finds that there is to be no step raises `StepSkipped`, which ends the step before the optimizer has looked at anything,
and goes no further than the replaced `step`. Several `Sync`s may listen to one optimizer: it steps if all agree.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from types import MethodType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from syncline.core.torch_internals import hooks_after_step, note_stepped
from syncline.errors import ConfigError
from syncline.guards.claims import claimed
from syncline.guards.finite import WithheldGradients
from syncline.reducer.backward import current_pass


class Step(IntEnum):
    """Who makes a step with the gradients at hand."""

    HERE = 0
    ELSEWHERE = 1  # a server does: the optimizer is not called, but what comes after its step is
    NOBODY = 2


@dataclass(frozen=True, eq=False)
class StepListener:
    """What is told of the steps of an optimizer."""

    before: Callable[[Optimizer], Step]  # makes gradients what the optimizer should see, if it is to make a step
    after: Callable[[Optimizer], None]  # the step has been made, or left out


class StepSkipped(BaseException):
    """Ends a step that is not to be made. It never leaves `WatchedOptimizer.run`."""

    def __init__(self, watched: WatchedOptimizer, step: Step, loss: Any) -> None:
        super().__init__()
        self.watched = watched
        self.step = step
        self.loss = loss  # of the closure


class _Running(threading.local):
    depth = 0  # steps of watched optimizers that this thread is in


_running = _Running()
_watched: WeakKeyDictionary[Optimizer, ReferenceType[WatchedOptimizer]] = WeakKeyDictionary()
_global_hook: list[RemovableHandle] = []
_watching = threading.RLock()  # ranks may be threads, and a destructor may close a Sync at any time


class WatchedOptimizer:
    """An optimizer whose steps have listeners. Its hooks keep it alive."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.listeners: list[StepListener] = []
        self.withheld = WithheldGradients()
        self.can_end = False  # inside the replaced step, which StepSkipped ends
        # Compilers leave our hooks alone, and compile what the optimizer does between them.
        self.ended = uncompiled(self.after)
        self.hooks = [
            optimizer.register_step_pre_hook(uncompiled(self.before)),
            optimizer.register_step_post_hook(self.ended),
        ]
        self.inner = optimizer.step
        self.replaced = self.replace_step(uncompiled(self.run, recursive=False))

    def replace_step(self, run: Callable[..., Any]) -> MethodType:
        """Let the optimizer's `step` be a bound method, as schedulers expect it to be."""

        @functools.wraps(self.inner)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return run(args, kwargs)

        step.__wrapped__ = getattr(self.inner, "__func__", self.inner)
        replaced = MethodType(step, self.optimizer)
        self.optimizer.step = replaced  # type: ignore[method-assign]
        return replaced

    def run(self, args: Any, kwargs: Any) -> Any:
        """Make a step, unless a hook ends it."""
        before, self.can_end = self.can_end, True
        _running.depth += 1
        try:
            return self.inner(*args, **kwargs)
        except StepSkipped as skipped:
            if skipped.watched is not self:
                raise
            note_stepped(self.optimizer)
            self.end_skipped(skipped.step, args, kwargs)
            return skipped.loss
        finally:
            _running.depth -= 1
            self.can_end = before

    def end_skipped(self, step: Step, args: Any, kwargs: Any) -> None:
        """Call the hooks that come after a step that was made elsewhere; after one that nobody made, only our own."""
        hooks = hooks_after_step(self.optimizer) if step == Step.ELSEWHERE else [self.ended]
        for hook in hooks:
            hook(self.optimizer, (self.optimizer, *args), kwargs)

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """See that nothing but synchronized, finite gradients reach the optimizer; a closure makes them first."""
        if current_pass() >= 0:
            raise ConfigError(
                "optimizer.step() was called in the middle of backward(), where gradients are not yet means over "
                "ranks; call it when backward() has returned"
            )
        itself, *given = args
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            self.skip_unless_here(self.prepare(), None)
            return None
        synchronized = self.synchronize_closure(closure)
        if given:
            return (itself, synchronized, *given[1:]), kwargs
        return args, {**kwargs, "closure": synchronized}

    def synchronize_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Judge gradients when the closure has made them. One that is called again has begun a step that goes on."""
        calls = itertools.count()

        def synchronized() -> Any:
            self.withheld.give_back()
            loss = closure()
            with torch.no_grad():
                self.skip_unless_here(self.prepare(), loss, has_begun=next(calls) > 0)
            return loss

        return synchronized

    def prepare(self) -> Step:
        """Ask every listener, also when the first has said no: ranks talk to each other there."""
        return max([listener.before(self.optimizer) for listener in self.listeners])

    def skip_unless_here(self, step: Step, loss: Any, has_begun: bool = False) -> None:
        """End a step that is not to be made here. Where that cannot be done, the optimizer finds no gradients."""
        if step == Step.HERE:
            return
        if self.can_end and not has_begun:
            raise StepSkipped(self, step, loss)
        self.withheld.withhold(p for group in self.optimizer.param_groups for p in group["params"])

    def after(self, optimizer: Optimizer, *_: object) -> None:
        """A step is over."""
        self.withheld.give_back()
        for listener in self.listeners:
            listener.after(optimizer)

    def remove(self, listener: StepListener) -> None:
        """Let go of the optimizer with the last listener."""
        self.withheld.give_back()
        self.listeners.remove(listener)
        if self.listeners:
            return
        for hook in self.hooks:
            hook.remove()
        if self.optimizer.__dict__.get("step") is self.replaced:  # else somebody has replaced it since, and calls it
            del self.optimizer.step
            if self.optimizer.step != self.inner:
                self.optimizer.step = self.inner  # type: ignore[method-assign]
        with _watching:
            _watched.pop(self.optimizer, None)
            if not _watched and _global_hook:
                _global_hook.pop().remove()


def uncompiled(call: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """The same, left to Python where the user compiles what calls it; without `recursive` what it calls is compiled."""
    left: Callable[..., Any] = torch.compiler.disable(call, recursive=recursive)  # type: ignore[no-untyped-call]
    return left


def watch_steps(optimizer: Optimizer, listener: StepListener) -> Callable[[], None]:
    """Tell a listener of all steps of an optimizer; returns what ends that."""
    found = _watched.get(optimizer)
    watched = (found() if found is not None else None) or WatchedOptimizer(optimizer)
    with _watching:
        _watched[optimizer] = ref(watched)
        if not _global_hook:
            _global_hook.append(register_optimizer_step_pre_hook(uncompiled(refuse_unwatched)))
    watched.listeners.append(listener)
    return functools.partial(watched.remove, listener)


def refuse_unwatched(optimizer: Optimizer, *_: object) -> None:
    """Refuse the step of an optimizer that changes parameters of a `Sync` that was not given it.

    Its steps would be counted by nobody: gradients that are not finite would be used, periods would not end, and what
    servers have would be written over it. Optimizers that wrap a watched one, or are wrapped by it, are told by it.
    """
    if optimizer in _watched or _running.depth:
        return
    shared = sum(p in claimed for group in optimizer.param_groups for p in group["params"])
    if not shared or any(one in _watched for one in optimizers_in(vars(optimizer).values())):
        return
    raise ConfigError(
        f"this {type(optimizer).__name__} changes {shared} parameters of a Sync that was made with another optimizer, "
        f"so its steps would not be synchronized; make the optimizer before Sync and give it to Sync, as one of a list "
        f"if there are several, or close() that Sync and make another with this one"
    )


def optimizers_in(values: Iterable[object]) -> list[Optimizer]:
    """Those among these values and in lists of them."""
    several = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in several if isinstance(one, Optimizer)]
