"""Ranks that have different numbers of batches, and `join`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch.distributed.algorithms.join import Join

import syncline
from support.loops import train_steps
from support.models import normalized
from support.runs import DdpRun, Result, Run, SyncRun
from support.scenarios import ADAM, PLAIN, Scenario


@dataclass(frozen=True)
class Uneven:
    """Ranks with different numbers of batches, and some steps of all of them afterwards."""

    counts: tuple[int, ...]  # batches of each rank
    divide_by: Literal["world", "active"]
    scenario: Scenario = field(default_factory=lambda: replace(PLAIN, model=normalized, optimizers=ADAM))
    afterwards: int = 3


def train_unevenly(fabric: syncline.Fabric, uneven: Uneven) -> tuple[Result, Result]:
    """At the end of the uneven part, and after some more steps."""
    run = SyncRun(uneven.scenario, fabric)
    with run.sync.join(divide_by=uneven.divide_by):
        train_steps(run, range(uneven.counts[fabric.rank]))
    joined = run.result()
    train_steps(run, range(100, 100 + uneven.afterwards))
    return joined, run.result()


def train_unevenly_with_ddp(fabric: syncline.Fabric, cases: Sequence[Uneven]) -> list[Result]:
    results = []
    for uneven in cases:
        run = DdpRun(uneven.scenario, fabric)
        with Join([run.callable], divide_by_initial_world_size=uneven.divide_by == "world"):
            train_steps(run, range(uneven.counts[fabric.rank]))
        results.append(run.result())
    return results


def train_unevenly_in_turn(fabric: syncline.Fabric, cases: Sequence[Uneven]) -> list[tuple[Result, Result]]:
    return [train_unevenly(fabric, uneven) for uneven in cases]


def train_unevenly_alone(uneven: Uneven) -> tuple[Result, Result]:
    """The batches of those that are present, as one."""
    world = len(uneven.counts)
    run = Run(uneven.scenario, range(world), world, seed=0)
    for step in range(max(uneven.counts)):
        run.ranks = [rank for rank in range(world) if step < uneven.counts[rank]]
        run.zero_grad()
        share = len(run.ranks) / world if uneven.divide_by == "world" else 1.0
        (run.loss(step) * share).backward()
        run.step()
    joined = run.result()
    run.ranks = range(world)
    train_steps(run, range(100, 100 + uneven.afterwards))
    return joined, run.result()
