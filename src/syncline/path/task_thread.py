"""A thread that does what is most urgent of what it was given. Whoever waits for the outcome does it instead.

On a machine whose cores are all busy it takes milliseconds until a thread that was woken runs. A thread that waits for
a task anyway is there already: it takes the tasks up itself, one at a time, while the other one sleeps. So does a
thread of an engine that has just ended a collective, and is awake.

A task gives the same bits in every thread: it finds torch there as a new thread does, and not under the autocast or
the inference mode in which somebody waits.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from syncline.errors import FabricClosed
from syncline.fabric.forked import Birthplace

Order = tuple[int, ...]  # tasks with a lower one come first


class TaskThread:
    """Carries out tasks one at a time; of those that wait, the one of the lowest order, then the oldest."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device  # that tasks compute on
        self.birthplace = Birthplace()
        self.lock = threading.Lock()
        self.for_thread = threading.Condition(self.lock)
        self.for_helper = threading.Condition(self.lock)
        self.ended = threading.Condition(self.lock)  # a task, once this is closed
        self.tasks: list[tuple[Order, int, Callable[[], None]]] = []
        self.count = 0  # of tasks that were ever given
        self.awaited: list[threading.Event] = []  # by those who help
        self.runner: int | None = None  # the thread that carries out a task
        self.is_closed = False
        self.thread: threading.Thread | None = None

    def put(self, order: Order, task: Callable[[], None], lends_thread: bool = False) -> None:
        """Give it a task, which must not raise. After `close` nothing is taken up any more.

        The caller may lend its thread: it carries out the task, if no other is under way and none comes before it.
        """
        self.birthplace.require()
        with self.lock:
            if self.is_closed:
                return
            heapq.heappush(self.tasks, (order, self.count, task))
            self.count += 1
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self.thread.start()
            if lends_thread and self.runner is None and self.tasks[0][2] is task:
                self._run_first()
            else:
                self._wake()

    def help_until(self, done: threading.Event) -> None:
        """Carry out tasks until one of them has set `done`."""
        self.birthplace.require()
        with self.lock:
            self.awaited.append(done)
            try:
                while not done.is_set():
                    if self.is_closed:
                        raise FabricClosed("this Sync was closed while a pass was under way")
                    if self.tasks and self.runner is None:
                        self._run_first()
                    else:
                        self.for_helper.wait()
            finally:
                self.awaited.remove(done)
                self._wake()

    def close(self) -> None:
        """End when the task under way has ended; those that wait are dropped."""
        with self.lock:
            self.is_closed = True
            self.tasks.clear()
            self.for_thread.notify_all()
            self.for_helper.notify_all()
            while self.runner not in (None, threading.get_ident()):
                self.ended.wait()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def _wake(self) -> None:
        """Wake whoever is to go on; who carries out a task looks again when it has ended. The lock is held."""
        if self.runner is not None:
            return
        if not self.awaited:
            if self.tasks:
                self.for_thread.notify()
        elif self.tasks or any(done.is_set() for done in self.awaited):
            self.for_helper.notify_all()

    def _run_first(self) -> None:
        """Carry out the first task, without the lock, which is held before and after."""
        _, _, task = heapq.heappop(self.tasks)
        self.runner = threading.get_ident()
        self.lock.release()
        try:
            with as_in_new_thread(self.device):
                task()
        finally:
            self.lock.acquire()
            self.runner = None
            self._wake()
            if self.is_closed:
                self.ended.notify_all()

    def _work(self) -> None:
        with self.lock:
            while not self.is_closed:
                if self.tasks and self.runner is None and not self.awaited:
                    self._run_first()
                else:
                    self.for_thread.wait()


@contextmanager
def as_in_new_thread(device: torch.device) -> Iterator[None]:
    """Let torch compute as in a thread that has just begun, without what the caller is inside of."""
    with ExitStack() as inside:
        if torch.is_inference_mode_enabled():
            inside.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled(device.type):
            inside.enter_context(torch.autocast(device.type, enabled=False))
        yield
