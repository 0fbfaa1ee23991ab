"""What hooks, bookkeeping and spans cost: a model of 400 small parameters in a world of one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import torch
from torch import nn

from syncline.fabric.base import Fabric
from syncline.fabric.shm import Meeting, ShmFabric
from syncline.fabric.threads import Threads
from syncline.sync import Sync
from syncline.workloads.mlp import make_many_small

STEPS = 4  # of a turn


class BucketsAlone(Sync):
    """Keeps buckets in a world of one too, only to measure them."""

    least_world: ClassVar[int] = 1


@dataclass(frozen=True)
class Overhead:
    """What is added to a step, as a share of it."""

    plain_s: float  # the step
    alone: float  # with Sync in a world of one
    bucketed: float  # with all that happens in larger worlds, but for the other ranks


def measure_overhead(repeats: int = 60) -> Overhead:
    """Short turns, each in another order and compared with the plain one beside it; medians of all."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone: Fabric = Threads().group(1).fabric(0)
    with ShmFabric(Meeting(), 0, 1) as shared:
        trainings = {
            "plain": Training(None, alone),
            "alone": Training(Sync, alone),
            "bucketed": Training(BucketsAlone, shared),
        }
        seconds: dict[str, list[float]] = {name: [] for name in trainings}
        order = list(trainings)
        for turn in range(repeats + 1):
            order = order[1:] + order[:1]
            for name in order:
                taken = trainings[name].turn()
                if turn:
                    seconds[name].append(taken)
    torch.set_num_threads(threads_before)
    added = {
        name: median(mine / plain - 1 for mine, plain in zip(taken, seconds["plain"], strict=True))
        for name, taken in seconds.items()
    }
    return Overhead(median(seconds["plain"]), added["alone"], added["bucketed"])


class Training:
    """One model, with or without synchronization."""

    def __init__(self, kind: type[Sync] | None, fabric: Fabric) -> None:
        self.model: nn.Module = make_many_small()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.sync = kind(self.model, self.optimizer, fabric=fabric) if kind else None
        self.x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))

    def turn(self) -> float:
        """Seconds of a step."""
        started = time.perf_counter()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
        return (time.perf_counter() - started) / STEPS
