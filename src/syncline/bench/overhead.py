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

STEPS = 10


class BucketsAlone(Sync):
    """Keeps buckets in a world of one too, only to measure them."""

    least_world: ClassVar[int] = 1


@dataclass(frozen=True)
class Overhead:
    """Seconds of a step."""

    plain_s: float
    alone_s: float  # with Sync in a world of one
    bucketed_s: float  # with all that happens in larger worlds, but for the other ranks


def measure_overhead(repeats: int = 15) -> Overhead:
    """Turns of ten steps each; medians."""
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
        for turn in range(repeats + 1):
            for name, training in trainings.items():
                taken = training.turn()
                if turn:
                    seconds[name].append(taken)
    torch.set_num_threads(threads_before)
    return Overhead(median(seconds["plain"]), median(seconds["alone"]), median(seconds["bucketed"]))


class Training:
    """One model, with or without synchronization."""

    def __init__(self, kind: type[Sync] | None, fabric: Fabric) -> None:
        self.model: nn.Module = make_many_small()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.sync = kind(self.model, self.optimizer, fabric=fabric) if kind else None
        self.x = torch.randn(32, 64)

    def turn(self) -> float:
        """Seconds of a step."""
        started = time.perf_counter()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
        return (time.perf_counter() - started) / STEPS
