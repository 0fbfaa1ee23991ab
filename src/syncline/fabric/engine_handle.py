"""Calls of the engine under way: one, or two of which the second follows the first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.errors import FabricError
from syncline.fabric.handle import Times, not_done_message

if TYPE_CHECKING:
    from syncline.fabric.torch import TorchTransport


class EngineHandle:
    """A call of the engine under way."""

    def __init__(
        self, transport: TorchTransport, call: str, work: dist.Work, end: Callable[[], bool | None], began_ns: int
    ) -> None:
        self.transport = transport
        self.call = call
        self.work: dist.Work | None = work  # until it has ended: it holds the tensors
        self.end = end
        self.began_ns = self.ended_ns = began_ns
        self.is_finite: bool | None = None
        self.future: torch.futures.Future[Any] | None = work.get_future()
        transport.health.watch.call_begins(self)
        self.future.add_done_callback(self._note_time)

    def _note_time(self, _: object = None) -> None:
        """Note the end, in the thread of the engine or in one that has waited, whichever comes first."""
        if self.ended_ns == self.began_ns:
            self.ended_ns = time.monotonic_ns()
            self.transport.health.watch.call_ends(self)

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when it is done; raise what it raised. Ctrl-C is heard meanwhile."""
        self.transport.birthplace.require()
        if not self.done():
            ended = threading.Event()
            self.on_done(ended.set)
            if not ended.wait(deadline_s):
                raise self.late(deadline_s)
        if self.future is None:
            return
        try:
            self.future.wait()  # the work itself has ended only when all who wait for its future have been called
        except RuntimeError as error:
            raise self.transport.health.failed(None, error, self.began_ns / 1e9, self.call) from error
        self._note_time()
        self.is_finite = self.end()
        self.let_go()

    def late(self, after_s: float | None) -> FabricError:
        """The error of a wait that was too short."""
        return FabricError(not_done_message(self.call, after_s or 0.0, self.transport.deadlines.operation))

    def let_go(self) -> None:
        """Hold the tensors no longer: the call has ended."""
        self.work = self.future = None
        self.end = lambda: None

    def done(self) -> bool:
        """Whether it is over, one way or another."""
        future = self.future
        return future is None or bool(future.done())

    def on_done(self, call: Callable[[], None]) -> None:
        """Have something called when it is over, in a thread of the engine."""
        future = self.future
        if future is None:
            call()
        else:
            future.add_done_callback(lambda _: call())

    def lends_thread(self) -> bool:
        """Whether it has ended well, over Gloo, which has a second thread for the calls that follow."""
        return self.transport.backend == "gloo" and self.future is not None and has_value(self.future)

    def times(self) -> Times:
        """When it happened; an engine does not say when all ranks had arrived."""
        return Times(self.began_ns, self.began_ns, self.ended_ns)

    def finite(self) -> bool | None:
        """Whether no element of the result is infinite or NaN, where that came out on the way."""
        return self.is_finite


def has_value(future: torch.futures.Future[Any]) -> bool:
    """Whether it has ended, and well."""
    try:
        future.value()
    except RuntimeError:
        return False
    return True


class ScratchMemory:
    """Memory for what comes from others, kept from call to call: pages that are given back are slow to get again."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A tensor like this one, with whatever is in it."""
        free = self.free.get((like.dtype, like.shape))
        return free.pop() if free else torch.empty_like(like)

    def give_back(self, tensor: Tensor) -> None:
        """Let others have it."""
        self.free.setdefault((tensor.dtype, tensor.shape), []).append(tensor)


class InOrder:
    """Calls that follow others, each begun when its first one is over: in the order of those, which all ranks share.

    They begin in the thread of the engine that has ended the first one: it is awake, and another one would take long.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.waiting: deque[FollowedHandle] = deque()

    def follow(self, first: EngineHandle, prepare: Callable[[], Callable[[], EngineHandle]]) -> FollowedHandle:
        """Prepare a second call when the first is over; what that returns begins it, in its turn."""
        handle = FollowedHandle(first)
        with self.lock:
            self.waiting.append(handle)
        first.on_done(lambda: self._go_on(handle, prepare))
        return handle

    def _go_on(self, handle: FollowedHandle, prepare: Callable[[], Callable[[], EngineHandle]]) -> None:
        begin = handle.begin_after(prepare)
        with self.lock:
            handle.begin = begin
            while self.waiting and self.waiting[0].begin is not None:
                self.waiting.popleft().go_on()


class FollowedHandle:
    """Two calls of the engine under way, of which the second follows the first."""

    def __init__(self, first: EngineHandle) -> None:
        self.first = first
        self.begin: Callable[[], EngineHandle] | None = None  # the second call, once the first is over
        self.last: Future[EngineHandle] = Future()  # the call that ends it, when that has begun

    def begin_after(self, prepare: Callable[[], Callable[[], EngineHandle]]) -> Callable[[], EngineHandle]:
        """What begins the second call; a first one that has failed is the last."""
        assert self.first.future is not None
        if not has_value(self.first.future):
            return lambda: self.first
        self.first.let_go()
        try:
            return prepare()
        except BaseException as error:
            self.last.set_exception(error)
            return lambda: self.first

    def go_on(self) -> None:
        """Begin the second call, now that all before it have begun."""
        assert self.begin is not None
        if self.last.done():
            return
        try:
            last = self.begin()
        except BaseException as error:
            self.last.set_exception(error)
        else:
            self.last.set_result(last)

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when it is done; raise what it raised. Ctrl-C is heard meanwhile."""
        self.first.transport.birthplace.require()
        try:
            last = self.last.result(deadline_s)
        except FutureTimeout:
            raise self.first.late(deadline_s) from None
        last.wait(deadline_s)

    def done(self) -> bool:
        """Whether it is over, one way or another."""
        return self.last.done() and (self.last.exception() is not None or self.last.result().done())

    def on_done(self, call: Callable[[], None]) -> None:
        """Have something called when it is over, in a thread of the engine."""
        self.last.add_done_callback(
            lambda last: call() if last.exception() is not None else last.result().on_done(call)
        )

    def lends_thread(self) -> bool:
        """Whether the second call lends it."""
        return self.last.done() and self.last.exception() is None and self.last.result().lends_thread()

    def times(self) -> Times:
        """When it happened; an engine does not say when all ranks had arrived."""
        return Times(self.first.began_ns, self.first.began_ns, self.last.result().ended_ns)

    def finite(self) -> bool | None:
        """Whether no element of the result is infinite or NaN, which nobody has looked at."""
        return None
