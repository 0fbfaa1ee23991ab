"""Training steps of several contenders on two ranks each: no synchronization, DDP over Gloo, and ours.

Ours takes part with the divergence guard, as it is, and without it, so that what the guard costs is a figure; its own
timer gives another one.

Contenders take turns of a few steps, and each is compared with the others of its turn. The first step of a turn does
not count: caches hold what others have left there, and no training has others in between. Both ranks begin a step
together, and it is over when the slower one has made it. All start from the same weights and see the same batches; at
the end those that synchronize must have the same weights, to rounding, or their times mean nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.bench.turns import RANKS, give_word, is_referee, ranks_needed, ranks_of, turns_of
from syncline.errors import SynclineError
from syncline.fabric.base import Fabric
from syncline.fabric.torch import TorchFabric
from syncline.launch import run
from syncline.launch.init import share_memory
from syncline.sync import Sync
from syncline.workloads.gpt import SHAPES, make_gpt, next_byte_loss
from syncline.workloads.mlp import make_many_small, make_mlp
from syncline.workloads.text import Batches, standard_library

Name = Literal["alone", "ddp", "syncline", "syncline unguarded", "syncline over gloo", "syncline topk"]
NAMES: tuple[Name, ...] = ("alone", "ddp", "syncline", "syncline unguarded", "syncline over gloo")
SHARED: dict[Name, dict[str, Any]] = {  # settings of those that go through shared memory
    "syncline": {},
    "syncline unguarded": {"divergence_guard": False},
    "syncline topk": {"codec": "topk:0.01"},
}
NORMAL = math.sqrt(math.pi / 2) / 1.349  # of a normal distribution, whose middle half is 1.349 standard deviations wide
STEPS = 4  # of a turn, the first of which does not count
WARM_UP = 1  # turns: buckets are built anew after the first step


@dataclass(frozen=True)
class Workload:
    """What is trained."""

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    loss: Callable[[nn.Module], Callable[[int, int], Tensor]]  # of a step on a rank


def gpt_workload(size: str, batch: int) -> Workload:
    """A GPT on the text of the standard library, with AdamW."""
    shape = SHAPES[size]

    def loss(model: nn.Module) -> Callable[[int, int], Tensor]:
        batches = Batches(standard_library(), shape.context, batch)

        def of(step: int, rank: int) -> Tensor:
            return next_byte_loss(model, batches.of(step, rank))

        return of

    return Workload(f"GPT of {size}, batch {batch}", partial(make_gpt, shape), adamw, loss)


def mlp_workload(batch: int) -> Workload:
    """More communication than computation."""
    return Workload(f"MLP of 37 M, batch {batch}", make_mlp, sgd, partial(size_of_answers, batch=batch, width=2304))


def many_small_workload() -> Workload:
    """Where hooks and bookkeeping weigh most."""
    loss = partial(size_of_answers, batch=32, width=64)
    return Workload("400 small parameters", make_many_small, adamw, loss)


def size_of_answers(model: nn.Module, batch: int, width: int) -> Callable[[int, int], Tensor]:
    """A loss: how large the answers to noise are."""

    def of(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        result: Tensor = model(torch.randn(batch, width, generator=generator)).square().mean()
        return result

    return of


def adamw(model: nn.Module) -> Optimizer:
    """As people train transformers."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def sgd(model: nn.Module) -> Optimizer:
    """The cheapest one."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt": partial(gpt_workload, "20M", 8),
    "gpt, larger batch": partial(gpt_workload, "20M", 32),
    "mlp": partial(mlp_workload, 4),
    "many small": many_small_workload,
}


class Contender:
    """One way to train, on one rank."""

    def __init__(self, name: Name, workload: Workload, group: TorchFabric) -> None:
        self.rank = group.rank
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        trained: nn.Module = self.model
        self.sync: Sync | None = None
        if name == "ddp":
            trained = DistributedDataParallel(self.model, process_group=group.group, gradient_as_bucket_view=True)
        elif name == "syncline over gloo":
            self.sync = Sync(self.model, self.optimizer, fabric=group)
        elif name in SHARED:
            self.sync = Sync(self.model, self.optimizer, fabric=share_memory(group), **SHARED[name])
        self.loss = workload.loss(trained)

    def step(self, number: int) -> None:
        """One step, as a user writes it."""
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss(number, self.rank))
        self.optimizer.step()

    def guard_share(self, turns: Sequence[Sequence[float]]) -> float:
        """What the divergence guard took, by its own timer, of these steps; waiting for a turn is in none of them."""
        if self.sync is None:
            return 0.0
        return self.sync.report().guard_s / mean(seconds for turn in turns for seconds in turn)


class RankTimes(NamedTuple):
    """The seconds of the steps of one rank that count, turn by turn, and what the guard says that it took."""

    turns: list[list[float]]
    guard_share: float = 0.0  # of a step


def time_training(fabric: Fabric, workload: str, names: Sequence[Name], repeats: int) -> RankTimes:
    """On one rank of a contender."""
    if is_referee(fabric):
        give_word(fabric, WARM_UP + repeats)
        return RankTimes([])
    number = fabric.rank // RANKS
    pair = fabric.subgroup(ranks_of(number))
    assert isinstance(pair, TorchFabric)
    contender = Contender(names[number], WORKLOADS[workload](), pair)
    turns = [
        [time_step(contender, pair, STEPS * turn + step) for step in range(STEPS)]
        for turn in turns_of(fabric, WARM_UP + repeats)
    ]
    compare_weights(fabric, contender.model, names)
    return RankTimes([seconds[1:] for seconds in turns[WARM_UP:]], contender.guard_share(turns))


def time_step(contender: Contender, pair: TorchFabric, number: int) -> float:
    """The seconds of a step that both ranks begin together."""
    pair.barrier()
    started = time.perf_counter()
    contender.step(number)
    return time.perf_counter() - started


def compare_weights(fabric: Fabric, model: nn.Module, names: Sequence[Name]) -> None:
    """On one rank of each contender that synchronizes: the first of them shows its weights to the others."""
    first, *others = [ranks_of(number)[0] for number, name in enumerate(names) if name != "alone"]
    for parameter in model.parameters():
        weights = parameter.detach()
        if fabric.rank == first:
            fabric.post([(weights, other) for other in others], []).wait()
        elif fabric.rank in others:
            shown = torch.empty_like(weights)
            fabric.post([], [(shown, first)]).wait()
            check_weights(names[fabric.rank // RANKS], weights, names[first // RANKS], shown)


def check_weights(name: str, weights: Tensor, other: str, expected: Tensor) -> None:
    """The same, to rounding."""
    error = float((weights - expected).norm() / expected.norm().clamp(min=1e-12))
    if error > 1e-3:
        raise SynclineError(f"{name} has other weights than {other} (by {error:.1e}), so its time means nothing")


@dataclass(frozen=True)
class StepTime:
    """What a step took with one contender."""

    workload: str
    contender: str
    median_s: float
    added_s: float  # to a step without synchronization
    added_error_s: float  # the standard error of it
    added_share: float
    faster_than_ddp: float
    guard_share: float = 0.0  # of a step, by the timer of the divergence guard


def compare_training(workload: str, names: Sequence[Name] = NAMES, repeats: int = 15) -> list[StepTime]:
    """Two ranks of each on this machine, one thread each."""
    work = partial(time_training, workload=workload, names=names, repeats=repeats)
    by_rank = run(work, ranks=ranks_needed(len(names)), fabric="torch")
    slowest = {
        name: [
            turn_time(of_ranks) for of_ranks in zip(*(by_rank[rank].turns for rank in ranks_of(number)), strict=True)
        ]
        for number, name in enumerate(names)
    }
    title = WORKLOADS[workload]().name
    times = [step_time(title, name, taken, slowest["alone"], slowest["ddp"]) for name, taken in slowest.items()]
    guards = [max(by_rank[rank].guard_share for rank in ranks_of(number)) for number in range(len(names))]
    return [replace(one, guard_share=share) for one, share in zip(times, guards, strict=True)]


def turn_time(of_ranks: Sequence[Sequence[float]]) -> float:
    """The median step of a turn; a step is over when the slower rank has made it."""
    slowest: list[float] = [max(of_step) for of_step in zip(*of_ranks, strict=True)]
    return median(slowest)


def step_time(title: str, name: str, taken: list[float], alone: list[float], ddp: list[float]) -> StepTime:
    """Compared turn by turn, because the machine is not as fast in all of them."""
    added = [mine - other for mine, other in zip(taken, alone, strict=True)]
    faster = median(other / mine for mine, other in zip(taken, ddp, strict=True))
    added_s = median(added)
    return StepTime(title, name, median(taken), added_s, error_of_median(added), added_s / median(alone), faster)


def error_of_median(values: list[float]) -> float:
    """The standard error, from the range of the middle half: that of all values would be ruled by the worst of them."""
    lower, _, upper = quantiles(values, n=4)
    return NORMAL * (upper - lower) / math.sqrt(len(values))


# What it costs in memory, and in a world of one


def peak_memory(name: Name, workload: str = "gpt") -> int:
    """The most memory that a rank had while it trained, above what it had before the model was made, in bytes.

    Pages of a peer's buckets that a rank has read or written are the peer's, and not counted twice.
    """
    return max(run(partial(watch_memory, name=name, workload=workload), ranks=2, fabric="torch"))


def watch_memory(fabric: Fabric, name: Name, workload: str) -> int:
    """On one rank."""
    assert isinstance(fabric, TorchFabric)
    what = WORKLOADS[workload]()
    before = resident_bytes("VmRSS")
    contender = Contender(name, what, fabric)
    for number in range(4):
        contender.step(number)
    reducer = contender.sync.reducer if contender.sync else None
    own = sum(bucket.nbytes for bucket in reducer.layout.buckets) if reducer and name in SHARED else 0
    of_peers = max(resident_bytes("RssShmem") - own, 0) if own else 0  # buckets of others that this rank has touched
    return resident_bytes("VmHWM") - before - of_peers


def resident_bytes(field: str) -> int:
    """A line of what the kernel says of this process: memory now (VmRSS) or at its most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0
