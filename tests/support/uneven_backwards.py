"""Ranks that make different numbers of backward passes before a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import syncline
from support.batches import STEPS, Batch
from support.loops import train_steps
from support.models import mlp
from support.runs import Result, Run, SyncRun
from support.scenarios import PLAIN, Scenario
from syncline.errors import Desync, PeerError


@dataclass(frozen=True)
class Unequal:
    """How many backward passes each rank makes before a step, from the third step on; before that one."""

    counts: tuple[int, ...]
    steps: int = 2  # that have so many
    scenario: Scenario = PLAIN

    def numbers(self, rank: int, step: int) -> list[int]:
        """Of the batches that a rank takes for a step."""
        return [100 * step + number for number in range(self.counts[rank])]


@dataclass
class Refused:
    """What a rank that was refused a pass had before it and after it, and after it tried to go on."""

    error: str
    number: int  # of the pass that was refused
    before: list[Tensor]
    after: list[Tensor]
    again: list[str]


def make_unequal_passes(fabric: syncline.Fabric, unequal: Unequal) -> Refused | str:
    """Until a pass is refused; what an error of another kind said, or how it ended well."""
    run = SyncRun(unequal.scenario, fabric)
    train_steps(run, range(2))
    before: list[Tensor] = []
    try:
        for step in range(2, 2 + unequal.steps):
            run.zero_grad()
            for number in unequal.numbers(fabric.rank, step):
                before = all_that_lasts(run)
                run.backward(number)
            run.step()
    except Desync as error:
        again = [text_of_error(work) for work in (run.step, partial(run.backward, 0), run.wait)]
        return Refused(str(error), run.sync.reducer.passes, before, all_that_lasts(run), again)
    except PeerError as error:
        return f"{type(error).__name__}: {error}"
    return "went well"


def all_that_lasts(run: SyncRun) -> list[Tensor]:
    """Parameters, optimizer states, and what codecs keep."""
    kept = [value for one in run.sync.reducer.path.state_dict().values() for value in one.values()]
    return [*run.result().tensors(), *(value.clone() for value in kept if isinstance(value, Tensor))]


def text_of_error(work: Callable[[], None]) -> str:
    try:
        work()
    except Desync as error:
        return str(error)
    return ""


def make_many_passes(fabric: syncline.Fabric, count: int) -> Result:
    """Before one step, in 16 bits: the verdict has to be exact in them."""
    run = SyncRun(replace(PLAIN, model=partial(mlp, torch.bfloat16), loss=squared_in_sixteen_bits), fabric)
    for _ in range(2):
        run.zero_grad()
        for number in range(count):
            run.backward(number)
        run.step()
    return run.result()


def squared_in_sixteen_bits(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x.bfloat16()) - batch.y.bfloat16()).square().mean()


def join_in_pairs(fabric: syncline.Fabric, batches: Sequence[int]) -> Result:
    """Two backward passes before each step; ranks have different numbers of batches, and train on afterwards."""
    run = SyncRun(PLAIN, fabric)
    with run.sync.join():
        for number in range(batches[fabric.rank]):
            if number % 2 == 0:
                run.zero_grad()
            run.backward(number)
            if number % 2:
                run.step()
    train_steps(run, range(100, 102))
    return run.result()


def train_with_no_sync(fabric: syncline.Fabric, unequal: Unequal) -> Result:
    """Whoever makes several backward passes before a step sends in the last one only."""
    run = SyncRun(unequal.scenario, fabric)
    for step in range(STEPS):
        run.zero_grad()
        *first, last = unequal.numbers(fabric.rank, step)
        with run.no_sync():
            for number in first:
                run.backward(number)
        run.backward(last)
        run.step()
    return run.result()


def train_unequally_alone(unequal: Unequal) -> Result:
    """One process with the batches of all ranks."""
    world = len(unequal.counts)
    run = Run(unequal.scenario, range(world), world, seed=0)
    for step in range(STEPS):
        run.zero_grad()
        for rank in range(world):
            run.ranks = [rank]
            for number in unequal.numbers(rank, step):
                (run.loss(number) / world).backward()
        run.step()
    return run.result()
