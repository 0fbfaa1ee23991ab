"""One thread that carries out calls in the order in which they were made.

It is started by the first asynchronous call. A synchronous call is carried out by its caller, unless calls are still
queued: then it waits for its turn behind them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from syncline.errors import FabricClosed, FabricError
from syncline.fabric.base import Times

T = TypeVar("T")


class Worker:
    """Carries out calls in turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.pool: ThreadPoolExecutor | None = None
        self.last: Future[object] | None = None
        self.is_closed = False

    def submit(self, work: Callable[[], Times], call: str, deadline_s: float) -> WorkerHandle:
        """Queue a call."""
        with self.lock:
            if self.is_closed:
                raise FabricClosed(f"the fabric is closed, so {call} cannot begin; make a new one")
            if self.pool is None:
                self.pool = ThreadPoolExecutor(1, thread_name_prefix=self.name)
            future = self.pool.submit(work)
            self.last = future  # type: ignore[assignment]
            return WorkerHandle(future, call, deadline_s)

    def in_turn(self, work: Callable[[], T]) -> T:
        """Carry out a call after those that are queued."""
        with self.lock:
            if self.pool is None or not self.busy():
                return work()
            future = self.pool.submit(work)
            self.last = future  # type: ignore[assignment]
        try:
            return future.result()
        except CancelledError:
            raise FabricClosed("the fabric was closed before the call had begun") from None

    def busy(self) -> bool:
        """Whether calls are under way."""
        return self.last is not None and not self.last.done()

    def close(self, drain: bool) -> None:
        """Let the thread end, after the calls that were submitted or without those that have not begun."""
        with self.lock:
            self.is_closed = True
            if self.pool is not None:
                self.pool.shutdown(wait=True, cancel_futures=not drain)
            self.pool = None


class WorkerHandle:
    """A queued call."""

    def __init__(self, future: Future[Times], call: str, deadline_s: float) -> None:
        self.future = future
        self.call = call
        self.deadline_s = deadline_s

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when it is done; raise what it raised."""
        try:
            self.future.result(deadline_s)
        except CancelledError:
            raise FabricClosed(f"the fabric was closed before {self.call} had begun") from None
        except FutureTimeout:
            raise FabricError(
                f"{self.call} is not done after {deadline_s} s; it goes on, and fails by itself when a rank is "
                f"{self.deadline_s} s late"
            ) from None

    def done(self) -> bool:
        """Whether it is over, one way or another."""
        return self.future.done()

    def times(self) -> Times:
        """When it happened."""
        return self.future.result()
