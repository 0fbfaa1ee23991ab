"""Training steps of several contenders on two ranks: no synchronization, DDP over Gloo, and ours.

Ours takes part with the divergence guard, as it is, and without it, so that what the guard costs is a figure; its own
timer gives another one. DDP takes part with several bucket sizes: its default and its best are shown.

Every rank has a replica of each contender, and these take turns of a few steps. The first step of a turn does not
count: caches hold what others have left there, and no training has others in between. All start from the same weights
and see the same batches; after a first turn, which does not count, those that synchronize must have the same weights,
to rounding, or their times mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median

from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.bench.contenders import Attach, Attached, Contender
from syncline.bench.metering import Meter, Metered, is_clean
from syncline.bench.timing import error_of_median, median_ratio, take_turns
from syncline.bench.trainer import Trainer
from syncline.bench.workloads import WORKLOADS
from syncline.errors import SynclineError
from syncline.fabric.base import Fabric
from syncline.launch import run
from syncline.launch.init import share_memory
from syncline.units import MIB

CONTENDERS = {
    "alone": Contender("alone"),
    "ddp": Contender("ddp"),
    **{f"ddp, {size} MB buckets": Contender("ddp", size * MIB) for size in (4, 2, 1)},
    "syncline": Contender("syncline none"),
    "syncline unguarded": Contender("syncline none", settings={"divergence_guard": False}),
    "syncline over gloo": Contender("syncline none"),
    "syncline topk": Contender("syncline topk:0.01"),
    "syncline topk, lean": Contender("syncline topk:0.01", settings={"lean": True}),
}
TIMED = tuple(name for name in CONTENDERS if not name.startswith("syncline topk"))
WEIGHED = ("ddp", "syncline", "syncline over gloo", "syncline topk", "syncline topk, lean")  # by their peak memory
STEPS = 4  # of a turn, the first of which does not count
MOST_DIFFERENCE = 1e-3  # of weights, relative

RankTimes = tuple[dict[str, list[Metered[float]]], dict[str, float]]


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
    busy_elsewhere: float = 0.0  # cores that other processes took, the mean over turns

    @property
    def clean(self) -> bool:
        """Whether others took so little that the figures can be believed."""
        return is_clean(self.busy_elsewhere)


def compare_training(workload: str, names: Sequence[str] = TIMED, repeats: int = 15) -> list[StepTime]:
    """Two ranks on this machine, one thread each; of DDP, its default and its best bucket size."""
    by_rank = run(
        partial(time_training, workload=workload, names=names, repeats=repeats, meter=Meter()), ranks=2, fabric="torch"
    )
    taken, _ = by_rank[0]
    steps = {name: [turn.value for turn in turns] for name, turns in taken.items()}
    times = [
        replace(
            step_time(WORKLOADS[workload]().title, name, steps[name], steps["alone"], steps["ddp"]),
            guard_share=max(guards[name] for _, guards in by_rank),
            busy_elsewhere=mean(turn.busy_elsewhere for turn in turns),
        )
        for name, turns in taken.items()
    ]
    best = min((one for one in times if one.contender.startswith("ddp")), key=lambda one: one.median_s)
    return [one for one in times if not one.contender.startswith("ddp,") or one is best]


def time_training(fabric: Fabric, workload: str, names: Sequence[str], repeats: int, meter: Meter) -> RankTimes:
    """On one rank: the median step of each turn, and what the guard says that it took of a step."""
    shared = share_memory(fabric)
    trainers = {name: Trainer(WORKLOADS[workload](), attach_to(name, shared), fabric) for name in names}
    for trainer in trainers.values():
        trainer.timed_steps(STEPS)
    compare_weights({name: trainer.model for name, trainer in trainers.items() if name != "alone"})
    turns = {name: partial(turn_time, trainer) for name, trainer in trainers.items()}
    taken = take_turns(fabric, turns, repeats, meter)
    guards = {name: guard_share(trainer, taken[name]) for name, trainer in trainers.items()}
    for trainer in trainers.values():
        trainer.close()
    return taken, guards


def attach_to(name: str, shared: Fabric) -> Attach:
    """The contender of this name; ours goes through shared memory, unless it is named after what it goes over."""

    def attach(model: nn.Module, optimizer: Optimizer, fabric: Fabric) -> Attached:
        return CONTENDERS[name](model, optimizer, fabric if name.endswith("over gloo") else shared)

    return attach


def turn_time(trainer: Trainer) -> float:
    """The median step of a turn."""
    seconds, _ = trainer.timed_steps(STEPS)
    return median(seconds[1:])


def guard_share(trainer: Trainer, turns: Sequence[Metered[float]]) -> float:
    """What the divergence guard took of a step, by its own timer; waiting for a turn is in none of them."""
    sync = trainer.attached.sync
    return 0.0 if sync is None else sync.report().guard_s / mean(turn.value for turn in turns)


def compare_weights(models: Mapping[str, nn.Module]) -> None:
    """All have the weights of the first, to rounding."""
    (first, model), *others = models.items()
    for name, other in others:
        for weights, expected in zip(other.parameters(), model.parameters(), strict=True):
            check_weights(name, weights.detach(), first, expected.detach())


def check_weights(name: str, weights: Tensor, other: str, expected: Tensor) -> None:
    """The same, to rounding."""
    error = float((weights - expected).norm() / expected.norm().clamp(min=1e-12))
    if error > MOST_DIFFERENCE:
        raise SynclineError(f"{name} has other weights than {other} (by {error:.1e}), so its time means nothing")


def step_time(title: str, name: str, taken: Sequence[float], alone: Sequence[float], ddp: Sequence[float]) -> StepTime:
    """Compared turn by turn, because the machine is not as fast in all of them."""
    added = [mine - other for mine, other in zip(taken, alone, strict=True)]
    added_s = median(added)
    share = added_s / median(alone)
    return StepTime(title, name, median(taken), added_s, error_of_median(added), share, median_ratio(ddp, taken))


# What it costs in memory


def peak_memory(name: str, workload: str = "gpt") -> int:
    """The most memory that a rank had while it trained, above what it had before the model was made, in bytes.

    Pages of a peer's buckets that a rank has read or written are the peer's, and not counted twice.
    """
    return max(run(partial(watch_memory, name=name, workload=workload), ranks=2, fabric="torch"))


def watch_memory(fabric: Fabric, name: str, workload: str) -> int:
    """On one rank."""
    what = WORKLOADS[workload]()
    shared = share_memory(fabric)
    before = resident_bytes("VmRSS")
    trainer = Trainer(what, attach_to(name, shared), fabric)
    for _ in range(STEPS):
        trainer.step()
    own = sum(parameter.nbytes for parameter in trainer.model.parameters())  # as large as its buckets
    of_peers = max(resident_bytes("RssShmem") - own, 0)
    return resident_bytes("VmHWM") - before - of_peers


def resident_bytes(field: str) -> int:
    """A line of what the kernel says of this process: memory now (VmRSS) or at its most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0
