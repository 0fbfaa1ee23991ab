"""One thread that carries out calls in the order in which they were made.

It is started by the first asynchronous call. A synchronous call is carried out by its caller, unless calls are still
queued: then it waits for its turn behind them.

A call of two parts, a beginning and an end that waits, leaves the thread after its beginning: a second thread waits,
while the first begins the next one. A few such calls are in flight at once, and they end in order; any other call waits
until they have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from syncline.errors import FabricClosed, FabricError
from syncline.fabric.forked import Birthplace
from syncline.fabric.handle import Ended, Times, not_done_message

T = TypeVar("T")
IN_FLIGHT = 2  # calls that have begun and not ended; as many as Gloo has threads to carry them out


class CallThread:
    """Carries out calls in turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.birthplace = Birthplace()
        self.lock = threading.RLock()
        self.pool: ThreadPoolExecutor | None = None
        self.ends: ThreadPoolExecutor | None = None  # of calls that are in flight
        self.room = threading.Semaphore(IN_FLIGHT)
        self.last: Future[Any] | None = None
        self.last_flight: Future[Ended] | None = None
        self.is_closed = False

    def submit(self, work: Callable[[], Times], call: str, deadline_s: float) -> CallHandle:
        """Queue a call."""
        self.birthplace.require()
        with self.lock:
            return CallHandle(self._queue(lambda: Ended(work()), call), call, deadline_s)

    def submit_flight(self, begin: Callable[[], Callable[[], Ended]], call: str, deadline_s: float) -> CallHandle:
        """Queue a call that begins in its turn; what `begin` returns waits for its end."""

        def start() -> Callable[[], Ended]:
            self.room.acquire()
            try:
                return begin()
            except BaseException:
                self.room.release()
                raise

        def end_in_turn(begun: Future[Callable[[], Ended]]) -> Ended:
            end = begun.result()
            try:
                return end()
            finally:
                self.room.release()

        self.birthplace.require()
        with self.lock:
            begun = self._pool(call).submit(start)
            if self.ends is None:
                self.ends = ThreadPoolExecutor(1, thread_name_prefix=f"{self.name}, ends")
            self.last = self.last_flight = self.ends.submit(end_in_turn, begun)
            return CallHandle(self.last_flight, call, deadline_s)

    def in_turn(self, work: Callable[[], T]) -> T:
        """Carry out a call after those that are queued."""
        self.birthplace.require()
        with self.lock:
            if self.pool is None or not self.busy():
                return work()
            future = self._queue(work, "the call")
        try:
            return future.result()
        except CancelledError:
            raise FabricClosed("the fabric was closed before the call had begun") from None

    def busy(self) -> bool:
        """Whether calls are under way."""
        return self.last is not None and not self.last.done()

    def close(self, drain: bool) -> None:
        """Let the threads end, after the calls that were submitted or without those that have not begun."""
        with self.lock:
            self.is_closed = True
            if self.pool is not None:
                self.pool.shutdown(wait=True, cancel_futures=not drain)
            if self.ends is not None:
                self.ends.shutdown(wait=True)  # what has not begun ends at once
            self.pool = self.ends = None

    def _queue(self, work: Callable[[], T], call: str) -> Future[T]:
        """Queue a call that is carried out when none is in flight."""
        flights = [self.last_flight] if self.last_flight is not None else []

        def alone() -> T:
            wait_for(flights)
            return work()

        future = self._pool(call).submit(alone)
        self.last = future
        return future

    def _pool(self, call: str) -> ThreadPoolExecutor:
        """The thread, which the first call starts."""
        if self.is_closed:
            raise FabricClosed(f"the fabric is closed, so {call} cannot begin; make a new one")
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, thread_name_prefix=self.name)
        return self.pool


class CallHandle:
    """A queued call."""

    def __init__(self, future: Future[Ended], call: str, deadline_s: float) -> None:
        self.birthplace = Birthplace()
        self.future = future
        self.call = call
        self.deadline_s = deadline_s

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when it is done; raise what it raised."""
        self.birthplace.require()
        try:
            self.future.result(deadline_s)
        except CancelledError:
            raise FabricClosed(f"the fabric was closed before {self.call} had begun") from None
        except FutureTimeout:
            raise FabricError(not_done_message(self.call, deadline_s or 0.0, self.deadline_s)) from None

    def done(self) -> bool:
        """Whether it is over, one way or another."""
        return self.future.done()

    def on_done(self, call: Callable[[], None]) -> None:
        """Have something called when it is over."""
        self.future.add_done_callback(lambda _: call())

    def lends_thread(self) -> bool:
        """Never: the next call waits for this thread."""
        return False

    def times(self) -> Times:
        """When it happened."""
        return self.future.result().times

    def finite(self) -> bool | None:
        """Whether no element of the result is infinite or NaN, where that came out on the way."""
        return self.future.result().finite
