"""Our algorithms against the engine's own all-reduce, over the same process group, in the same run.

Contenders take turns within a repeat, so that a slow moment of the machine hits all of them alike. Before each call the
input is written anew and ranks meet; the time of a call is that of its slowest rank; a contender's time is the median
over repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from syncline.bench.calls import AllReduce, pattern, verify
from syncline.bench.metering import Meter, cleanest
from syncline.bench.timing import most_of_ranks, seconds_of
from syncline.collectives.registry import ALGORITHMS
from syncline.fabric.base import Fabric
from syncline.launch import run

ENGINE = "engine"


@dataclass(frozen=True)
class Measured:
    """What one contender took."""

    name: str
    median_s: float
    fastest_s: float
    ratio: float  # to the engine's median; below 1 is faster
    busy_elsewhere: float  # cores that other processes took


def compare_algorithms(ranks: int, nbytes: int, repeats: int) -> list[Measured]:
    """Measure every algorithm and the engine, `repeats` times each."""
    names = [*ALGORITHMS, ENGINE]
    work = partial(time_calls, names=names, numel=nbytes // 4, repeats=repeats)
    by_rank, busy = cleanest(partial(run, work, ranks=ranks, fabric="torch"), Meter())
    slowest = by_rank[0]
    engine_s = median(slowest[ENGINE])
    return [
        Measured(name, median(times), min(times), median(times) / engine_s, busy) for name, times in slowest.items()
    ]


def time_calls(fabric: Fabric, names: Sequence[str], numel: int, repeats: int) -> dict[str, list[float]]:
    """On one rank: the seconds of each call on the slowest. The first turn warms up and is not counted."""
    bucket = fabric.buffer(numel)
    checked = {
        name: AllReduce(bucket.numpy(), fabric.rank, fabric.world, partial(call, fabric, bucket, name), fabric.barrier)
        for name in names
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name, one in checked.items():
            np.copyto(one.buffer, pattern(numel, fabric.rank, turn))
            seconds[name].append(seconds_of(fabric, one.call))
            verify(one, turn)
    return {name: most_of_ranks(fabric, taken[1:]) for name, taken in seconds.items()}


def call(fabric: Fabric, bucket: torch.Tensor, name: str) -> None:
    """One call of ours, or the engine's own with nothing of ours around it."""
    if name == ENGINE:
        dist.all_reduce(bucket)
    else:
        fabric.all_reduce(bucket, collective=name)
