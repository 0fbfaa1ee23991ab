"""All-reduce over sizes and worlds, every contender in the same run."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from statistics import median
from typing import Any

import torch

import syncline
from syncline.bench.metering import Meter, cleanest
from syncline.bench.peers import CONTENDERS

MPIS = ("open mpi", "mpich")


@dataclass(frozen=True)
class Row:
    """What one contender took for one size in one world."""

    contender: str
    ranks: int
    bytes: int
    median_s: float
    fastest_s: float
    busy_elsewhere: float = 0.0  # cores that other processes took

    @property
    def gigabytes_per_s(self) -> float:
        """The buffer's bytes over the time."""
        return self.bytes / self.median_s / 1e9


class Results:
    """All rows, and the comparisons that are made of them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.by_key = {(row.contender, row.ranks, row.bytes): row for row in rows}

    def worlds(self) -> list[int]:
        """Numbers of ranks, ascending."""
        return sorted({row.ranks for row in self.rows})

    def sizes(self) -> list[int]:
        """Bytes, ascending."""
        return sorted({row.bytes for row in self.rows})

    def contenders(self) -> list[str]:
        """In the order of the table."""
        return [name for name in CONTENDERS if any(row.contender == name for row in self.rows)]

    def seconds(self, contender: str, ranks: int, nbytes: int) -> float | None:
        """A contender's median."""
        row = self.by_key.get((contender, ranks, nbytes))
        return row.median_s if row else None

    def times_faster(self, than: Sequence[str], ranks: int, nbytes: int) -> float | None:
        """How many times faster ours is than the fastest of some."""
        ours = self.seconds("syncline", ranks, nbytes)
        theirs = [seconds for name in than if (seconds := self.seconds(name, ranks, nbytes)) is not None]
        return min(theirs) / ours if theirs and ours else None

    def versions(self) -> dict[str, Any]:
        """What is needed to repeat it."""
        return {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "versions": {"syncline": syncline.__version__, "torch": torch.__version__},
            "machine": platform.machine(),
        }


def compare(
    contenders: Sequence[str],
    worlds: Sequence[int],
    sizes: Sequence[int],
    repeats: int,
    tell: Callable[[str], None],
) -> Results:
    """Measure each contender in each world, one after the other; `tell` hears what is being measured."""
    rows = []
    for ranks in worlds:
        for name in contenders:
            tell(f"{name}, {ranks} ranks")
            measured, busy = cleanest(partial(CONTENDERS[name], ranks, sizes, repeats), Meter())
            for nbytes, times in measured.items():
                rows.append(Row(name, ranks, nbytes, max(median(times), 1e-9), min(times), busy))
    return Results(rows)
