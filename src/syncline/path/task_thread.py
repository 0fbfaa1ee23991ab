"""A thread that does what is most urgent of what it was given."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

from syncline.fabric.forked import Birthplace

Order = tuple[int, ...]  # tasks with a lower one come first


class TaskThread:
    """Carries out tasks one at a time; of those that wait, the one of the lowest order, then the oldest."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.birthplace = Birthplace()
        self.changed = threading.Condition()
        self.tasks: list[tuple[Order, int, Callable[[], None]]] = []
        self.count = 0  # of tasks that were ever given
        self.is_closed = False
        self.thread: threading.Thread | None = None

    def put(self, order: Order, task: Callable[[], None]) -> None:
        """Give it a task, which must not raise. After `close` nothing is taken up any more."""
        self.birthplace.require()
        with self.changed:
            if self.is_closed:
                return
            heapq.heappush(self.tasks, (order, self.count, task))
            self.count += 1
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self.thread.start()
            self.changed.notify()

    def close(self) -> None:
        """End when the task under way has ended; those that wait are dropped."""
        with self.changed:
            self.is_closed = True
            self.tasks.clear()
            self.changed.notify()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.tasks and not self.is_closed:
                    self.changed.wait()
                if self.is_closed:
                    return
                _, _, task = heapq.heappop(self.tasks)
            task()
