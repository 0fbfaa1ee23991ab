"""How steps are timed, the same for every contender.

All ranks begin a step together, and it is over when the slowest has made it. Contenders take turns of a few steps, in
another order every time, so that a slow moment of the machine hits all alike and none always comes after the same
other; each is compared with the others of its turn. A turn that other processes disturbed is made again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import median, quantiles
from typing import TypeVar

import torch

from syncline.bench.metering import TRIES, Meter, Metered, cleanest
from syncline.fabric.base import Fabric

K = TypeVar("K")
T = TypeVar("T")
NORMAL = math.sqrt(math.pi / 2) / 1.349  # of a normal distribution, whose middle half is 1.349 standard deviations wide


def seconds_of(fabric: Fabric, call: Callable[[], object]) -> float:
    """The seconds of a call that all ranks begin together, on this rank."""
    fabric.barrier()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def most_of_ranks(fabric: Fabric, values: Sequence[float]) -> list[float]:
    """The largest of each value over ranks: of seconds, those of the slowest rank."""
    largest: list[float] = fabric.all_reduce(torch.tensor(values, dtype=torch.float64), op="max").tolist()
    return largest


def take_turns(
    fabric: Fabric, contenders: Mapping[K, Callable[[], T]], turns: int, meter: Meter, tries: int = TRIES
) -> dict[K, list[Metered[T]]]:
    """What each contender's turns gave; all ranks agree on which are made again."""

    def agree(busy_elsewhere: float) -> float:
        return most_of_ranks(fabric, [busy_elsewhere if fabric.rank == 0 else 0.0])[0]

    order, shuffle = [*contenders], Random(0).shuffle
    taken: dict[K, list[Metered[T]]] = {name: [] for name in contenders}
    for _ in range(turns):
        shuffle(order)
        for name in order:
            taken[name].append(cleanest(contenders[name], meter, agree, tries))
    return taken


def median_ratio(theirs: Sequence[float], mine: Sequence[float]) -> float:
    """How many times faster mine is, turn by turn: the machine is not as fast in all of them."""
    return median(other / own for other, own in zip(theirs, mine, strict=True))


def error_of_median(values: Sequence[float]) -> float:
    """The standard error, from the range of the middle half: that of all values would be ruled by the worst of them."""
    lower, _, upper = quantiles(values, n=4)
    return NORMAL * (upper - lower) / math.sqrt(len(values))
