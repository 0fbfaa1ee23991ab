"""Processor time that other processes take while something is timed.

A benchmark that shares its cores measures its neighbours too. What is timed is therefore made again when other
processes have taken more than a tenth of a core meanwhile; of several tries the one that was disturbed least counts,
and it says by how much.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
MOST_ELSEWHERE = 0.1  # cores
TRIES = 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KERNEL = 2  # the process that starts the kernel's threads; these work for the links, too


class Metered(NamedTuple, Generic[T]):
    """A result, and the cores that other processes took while it was made."""

    value: T
    busy_elsewhere: float


def is_clean(busy_elsewhere: float) -> bool:
    """Whether others took so little that a figure can be believed."""
    return busy_elsewhere <= MOST_ELSEWHERE


@dataclass(frozen=True)
class Meter:
    """Reads the processor time of all processes but a benchmark's own: that which made the meter, and its children."""

    root: int = field(default_factory=os.getpid)

    def run(self, work: Callable[[], T]) -> Metered[T]:
        """Do the work, and say how many cores others took meanwhile."""
        before, started = self.seconds_elsewhere(), time.perf_counter()
        result = work()
        elapsed = time.perf_counter() - started
        taken = self.seconds_elsewhere() - before - 1 / TICKS_PER_S  # a single tick is no more than rounding
        return Metered(result, max(0.0, taken) / max(elapsed, 1e-3))

    def seconds_elsewhere(self) -> float:
        """Processor time that others have had, with that of their children that have ended, and what the host stole.

        The time of a process that ends is from then on in its parent's, so that nothing is lost between two readings.
        """
        processes = dict(each_process())
        own = {self.root}
        while children := {pid for pid, (parent, _) in processes.items() if parent in own} - own:
            own |= children
        elsewhere = sum(ticks for pid, (_, ticks) in processes.items() if pid not in own)
        return (elsewhere + stolen_ticks()) / TICKS_PER_S


def stolen_ticks() -> int:
    """Processor time that the host of this virtual machine gave to others."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8])


def each_process() -> list[tuple[int, tuple[int, int]]]:
    """Every process that can be seen and is not a thread of the kernel: its parent, and its ticks of processor time."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if KERNEL not in (int(folder.name), int(fields[1])):
                    found.append((int(folder.name), (int(fields[1]), sum(map(int, fields[11:15])))))
    return found


def agree_alone(busy_elsewhere: float) -> float:
    """The agreement of one process with itself."""
    return busy_elsewhere


def cleanest(
    work: Callable[[], T], meter: Meter, agree: Callable[[float], float] = agree_alone, tries: int = TRIES
) -> Metered[T]:
    """Do the work until nobody disturbs it, a few times at most; the try that was disturbed least counts.

    Where several ranks do it together, `agree` gives all of them what one has read.
    """
    best: Metered[T] | None = None
    for _ in range(tries):
        result, cores = meter.run(work)
        cores = agree(cores)
        if best is None or cores < best.busy_elsewhere:
            best = Metered(result, cores)
        if is_clean(cores):
            break
    assert best is not None
    return best
