"""How far workers are, and who may go on: no worker is more than `bound` steps ahead of the slowest.

A worker that is gone does not hold up the others, and neither does one that waits for them in a meeting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Read(NamedTuple):
    """A worker was given parameters."""

    worker: int
    clock: int  # steps that it has made
    slowest: int  # steps that every worker has made
    version: int  # updates in what it read


class Clock:
    """Counts the steps of every worker."""

    def __init__(self, workers: Iterable[int], bound: float) -> None:
        self.steps = dict.fromkeys(workers, 0)  # of those that are at work
        self.resting: dict[int, int] = {}  # the steps of those that wait for all others
        self.bound = bound
        self.reads: deque[Read] = deque(maxlen=100_000)

    @property
    def slowest(self) -> int:
        """Steps that every worker has made."""
        return min(self.steps.values(), default=0)

    def tick(self, worker: int, step: int) -> None:
        """A worker has made a step."""
        if worker in self.steps:
            self.steps[worker] = step

    def rest(self, worker: int, step: int) -> None:
        """A worker waits for all others."""
        self.drop(worker)
        self.resting[worker] = step

    def resume(self) -> None:
        """Those that have waited go on, all as far as the one that was furthest."""
        furthest = max(self.resting.values(), default=0)
        self.steps |= dict.fromkeys(self.resting, furthest)
        self.resting.clear()

    def may_go_on(self, worker: int) -> bool:
        """Whether a worker may read parameters and begin its next step."""
        return worker not in self.steps or self.steps[worker] - self.slowest <= self.bound

    def note_read(self, worker: int, version: int) -> None:
        """A worker goes on."""
        self.reads.append(Read(worker, self.steps.get(worker, 0), self.slowest, version))

    def drop(self, worker: int) -> None:
        """A worker is gone."""
        self.steps.pop(worker, None)
        self.resting.pop(worker, None)

    def enter(self, worker: int) -> int:
        """A worker comes, and is as far as the slowest unless it was there already; returns its clock."""
        furthest = max(self.resting.values(), default=0)
        return self.steps.setdefault(worker, min(self.steps.values(), default=furthest))
