"""What hooks, bookkeeping and spans cost: a model of 400 small parameters in a world of one."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.bench.contenders import Attach, Attached, Contender
from syncline.bench.metering import Meter, cleanest
from syncline.bench.timing import take_turns
from syncline.bench.trainer import Trainer
from syncline.bench.workloads import WORKLOADS
from syncline.fabric.base import Fabric
from syncline.fabric.shm import Meeting, shm_fabric
from syncline.fabric.threads import Threads
from syncline.sync import Sync

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
    busy_elsewhere: float = 0.0  # cores that other processes took


def measure_overhead(repeats: int = 60) -> Overhead:
    """Short turns, each compared with the plain one beside it; medians of all."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    with shm_fabric(Meeting(), 0, 1) as shared:

        def attach_buckets(model: nn.Module, optimizer: Optimizer, _: Fabric) -> Attached:
            return Attached(model, lambda: 0.0, BucketsAlone(model, optimizer, fabric=shared))

        ways: dict[str, Attach] = {
            "plain": Contender("alone"),
            "alone": Contender("syncline none"),
            "bucketed": attach_buckets,
        }
        fabric = Threads().group(1).fabric(0)
        trainers = {name: Trainer(WORKLOADS["many small"](), attach, fabric) for name, attach in ways.items()}
        turns = {
            name: lambda trainer=trainer: mean(trainer.timed_steps(STEPS)[0]) for name, trainer in trainers.items()
        }
        take_turns(fabric, turns, 1, meter := Meter())  # buckets are built anew
        taken, busy = cleanest(lambda: take_turns(fabric, turns, repeats, meter, tries=1), meter)
    torch.set_num_threads(threads_before)
    seconds = {name: [turn.value for turn in turns_of] for name, turns_of in taken.items()}
    added = {
        name: median(mine / plain - 1 for mine, plain in zip(of_one, seconds["plain"], strict=True))
        for name, of_one in seconds.items()
    }
    return Overhead(median(seconds["plain"]), added["alone"], added["bucketed"], busy)
