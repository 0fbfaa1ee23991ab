"""Workers of uneven speed: what a slow one costs in each mode, and what is learned meanwhile.

A worker's step is a real one of a small GPT on real text, and a sleep that stands for the computation of a large one: a
few cores could not compute for four workers at full speed, but they can wait for four. Modes run one after the other,
each for the same time, with the same slow steps. Rank 0 keeps its parameters at intervals; they are evaluated on text
that nobody trains on when the time is over.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from torch import Tensor, nn

from syncline.bench.contenders import Contender
from syncline.bench.metering import Meter, cleanest
from syncline.bench.trainer import Trainer
from syncline.bench.workloads import HELD_OUT_BYTES, adamw, gpt_workload, held_out_loss
from syncline.errors import UnknownName
from syncline.fabric.base import Fabric
from syncline.launch import run
from syncline.sync import Sync
from syncline.workloads.gpt import Shape, make_gpt

MODES = ("sync", "delayed", "local:every=8", "bounded:ahead=1", "bounded:ahead=4", "bounded:ahead=16", "async")
SITUATIONS = {
    "bursts": "any worker is slow for 2 to 4 steps now and then, a third of its steps",
    "one": "one worker is slow for 10 to 20 steps now and then, a third of its steps",
    "always": "one worker is slow all the time",
}
SHAPE = Shape(width=64, layers=1, heads=2, context=32)
BATCH = 4
SNAPSHOTS = 20
PLANNED_STEPS = 100_000  # more than anybody makes
WARM_UP = 3  # steps that are not counted


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long computation takes, and when it takes longer."""

    situation: str
    workers: int = 4
    step_s: float = 0.04
    slower: float = 3.0  # times that a slow step takes
    slow_share: float = 1 / 3  # of the steps of a worker that has bursts
    seed: int = 0

    def __post_init__(self) -> None:
        if self.situation not in SITUATIONS:
            raise UnknownName("situation", self.situation, SITUATIONS)

    def slow_steps(self, rank: int, steps: int) -> list[bool]:
        """Which of a worker's steps are slow: the same in every mode."""
        if self.situation == "bursts":
            return self.bursts(rank, steps, 2, 4)
        if rank != self.workers - 1:
            return [False] * steps
        return [True] * steps if self.situation == "always" else self.bursts(rank, steps, 10, 20)

    def bursts(self, rank: int, steps: int, shortest: int, longest: int) -> list[bool]:
        """Of slow steps, with random pauses."""
        draw = random.Random(1_000 * self.seed + rank)
        pause = (shortest + longest) / 2 * (1 - self.slow_share) / self.slow_share
        slow: list[bool] = []
        while len(slow) < steps:
            slow += [False] * round(draw.expovariate(1 / pause)) + [True] * draw.randint(shortest, longest)
        return slow[:steps]

    def seconds_of(self, slow: bool) -> float:
        """The computation of a step."""
        return self.step_s * (self.slower if slow else 1.0)


@dataclass(frozen=True)
class Worked:
    """What one worker did."""

    steps: int
    curve: list[tuple[float, float]]  # seconds and loss, of rank 0
    staleness: float  # updates by others between reading and writing, on average


@dataclass(frozen=True)
class Outcome:
    """One mode in one situation."""

    situation: str
    mode: str
    seconds: float
    steps: list[int]  # of each worker
    curve: list[tuple[float, float]]  # seconds and loss on text that nobody trained on
    staleness: float
    busy_elsewhere: float = 0.0  # cores that other processes took

    @property
    def steps_per_s(self) -> float:
        """Of all workers together."""
        return sum(self.steps) / self.seconds

    @property
    def loss(self) -> float:
        """When time is over."""
        return self.curve[-1][1]

    def seconds_to(self, loss: float) -> float | None:
        """Until the loss was as low as this, between two snapshots; None if it never was."""
        above = list(takewhile(lambda at: at[1] > loss, self.curve))
        if len(above) == len(self.curve):
            return None
        end = self.curve[len(above)]
        start = above[-1] if above else end
        share = (start[1] - loss) / (start[1] - end[1]) if start[1] > end[1] else 1.0
        return start[0] + share * (end[0] - start[0])


def compare_modes(
    situations: Sequence[str], modes: Sequence[str], seconds: float, workers: int, tell: Callable[[str], None]
) -> list[Outcome]:
    """Every mode in every situation."""
    outcomes = []
    for situation in situations:
        pace = Pace(situation=situation, workers=workers)
        for mode in modes:
            tell(f"{situation}: {mode}")
            work_all = partial(run, partial(work, mode=mode, pace=pace, seconds=seconds), ranks=workers)
            done, busy = cleanest(work_all, Meter())
            staleness = sum(one.staleness for one in done) / workers
            steps = [one.steps for one in done]
            outcomes.append(Outcome(situation, mode, seconds, steps, done[0].curve, staleness, busy))
    return outcomes


def work(fabric: Fabric, mode: str, pace: Pace, seconds: float) -> Worked:
    """On one worker."""
    text = gpt_workload(SHAPE, BATCH, partial(adamw, rate=1e-3), HELD_OUT_BYTES)
    slow = pace.slow_steps(fabric.rank, PLANNED_STEPS)

    def slow_loss(model: nn.Module, step: int, rank: int) -> Tensor:
        loss = text.loss(model, step, rank)
        time.sleep(pace.seconds_of(slow[step]))
        return loss

    trainer = Trainer(replace(text, loss=slow_loss), Contender("syncline none", settings={"mode": mode}), fabric)
    for _ in range(WARM_UP):
        trainer.step()
    fabric.barrier()
    snapshots = Snapshots(trainer.model, seconds) if fabric.rank == 0 else None
    started, steps = time.perf_counter(), 0
    sync = trainer.attached.sync
    assert sync is not None
    with until_all_are_done(sync, mode):
        while time.perf_counter() - started < seconds:
            trainer.step()
            steps += time.perf_counter() - started < seconds
            if snapshots is not None:
                snapshots.keep_when_due(time.perf_counter() - started)
    staleness = sync.staleness().mean
    sync.close()
    return Worked(steps, snapshots.curve() if snapshots else [], staleness)


def until_all_are_done(sync: Sync, mode: str) -> AbstractContextManager[None]:
    """Time is over on all workers at once, but some have made a step more; those of modes with servers do not mind."""
    return nullcontext() if mode.startswith(("async", "bounded")) else sync.join()


class Snapshots:
    """Parameters at intervals."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        self.model = model
        self.interval_s = seconds / SNAPSHOTS
        self.kept: list[tuple[float, dict[str, Tensor]]] = []
        self.keep(0.0)

    def keep(self, elapsed_s: float) -> None:
        """As they are now."""
        self.kept.append((elapsed_s, {name: value.clone() for name, value in self.model.state_dict().items()}))

    def keep_when_due(self, elapsed_s: float) -> None:
        """At most once an interval."""
        if elapsed_s >= len(self.kept) * self.interval_s:
            self.keep(elapsed_s)

    def curve(self) -> list[tuple[float, float]]:
        """The loss of each on text that nobody trained on."""
        judge = make_gpt(SHAPE)
        found = []
        for elapsed_s, parameters in self.kept:
            judge.load_state_dict(parameters)
            found.append((elapsed_s, float(held_out_loss(judge, SHAPE, 256))))
        return found
