"""Ranks that fail in a forward or backward pass, and go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

import syncline
from support.batches import STEPS, Batch
from support.loops import hooks_of, train_steps
from support.models import Boom, MoreAndMore, Trapped
from support.runs import Result, Run, SyncRun
from support.scenarios import ADAM, PLAIN, Optimizers, Scenario, train
from syncline.errors import LateGradient, PeerError


@dataclass(frozen=True)
class Failing:
    """Some ranks fail in some steps, and the loop goes on."""

    where: str  # a place of `Trapped`
    ranks: frozenset[int]
    then: Literal["step", "next"]  # the rank calls step all the same, or goes on with its next batch
    steps: tuple[int, ...] = (0, 2, 3)
    settings: tuple[tuple[str, Any], ...] = ()
    optimizers: Optimizers = ADAM

    def trap(self, batch: Batch) -> str:
        """Where this batch fails."""
        return self.where if batch.rank in self.ranks and batch.step in self.steps else ""


def of_trapped(failing: Failing, model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x, failing.trap(batch)) - batch.y).square().mean()


def failing_scenario(failing: Failing) -> Scenario:
    def loop(run: Run) -> None:
        for step in range(STEPS + 2):
            run.zero_grad()
            try:
                run.backward(step)
            except Boom:
                if failing.then == "next":
                    continue
            run.step()

    return Scenario(
        loop=loop,
        model=Trapped,
        loss=partial(of_trapped, failing),
        optimizers=failing.optimizers,
        settings=dict(failing.settings),
    )


def fail_and_go_on(fabric: syncline.Fabric, failing: Failing) -> Result:
    return train(fabric, failing_scenario(failing))


def be_surprised(fabric: syncline.Fabric) -> tuple[list[str], Result, Result, Result]:
    """From step 2 on a gradient comes after its bucket has left, on rank 1 only; what happened, before and after."""
    scenario = replace(PLAIN, model=MoreAndMore, loss=of_more_and_more, settings={"bucket_bytes": 1})
    run = SyncRun(scenario, fabric)
    train_steps(run, range(2))
    before, errors = run.result(), []
    run.zero_grad()
    try:
        run.backward(2)
    except LateGradient as error:
        errors.append(str(error))
    run.step()
    after = run.result()
    run.zero_grad()
    with run.no_sync():
        run.backward(3)
    run.step()
    return errors, before, after, run.result()


def be_surprised_and_leave(fabric: syncline.Fabric, mode: str) -> str:
    """The same with a bucket for every parameter, and nobody catches the error of rank 1: what the others are told."""
    settings = {"first_bucket_bytes": 1, "bucket_bytes": 1, "mode": mode}
    run = SyncRun(replace(PLAIN, model=MoreAndMore, loss=of_more_and_more, settings=settings), fabric)
    try:
        train_steps(run, range(5))
    except PeerError as error:
        return str(error)
    return ""


def of_more_and_more(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x, segments=2 if batch.step > 1 and batch.rank == 1 else 1) - batch.y).square().mean()


def surprised_alone(world: int) -> Result:
    """Without the step that was a surprise."""
    run = Run(replace(PLAIN, model=MoreAndMore, loss=of_more_and_more), range(world), world, seed=0)
    train_steps(run, [0, 1, 3])
    return run.result()


def leave_it(fabric: syncline.Fabric) -> tuple[Result, list[object]]:
    """Close, and train on with as many steps as this rank likes."""
    run = SyncRun(PLAIN, fabric)
    train_steps(run, range(2))
    run.sync.close()
    together = run.result()
    train_steps(run, range(fabric.rank))
    return together, hooks_of(run.model)


def lose_batches(fabric: syncline.Fabric, failing: Failing) -> Result:
    """Go on with the next batch after a failure, so that ranks have different numbers of batches."""
    run = SyncRun(failing_scenario(failing), fabric)
    with run.sync.join():
        failing_scenario(failing).loop(run)
    train_steps(run, range(100, 102))
    return run.result()


def without_lost_batches(failing: Failing, world: int) -> Result:
    """The first of each rank's good batches together, then the second, and so on."""
    run = Run(failing_scenario(replace(failing, ranks=frozenset())), range(world), world, seed=0)
    steps = range(STEPS + 2)
    good = [[step for step in steps if not failing.trap(Batch(rank, step))] for rank in range(world)]
    for position in range(max(map(len, good))):
        run.zero_grad()
        present = [Batch(rank, mine[position]) for rank, mine in enumerate(good) if position < len(mine)]
        (sum(run.scenario.loss(run.model, batch) for batch in present) / world).backward()
        run.step()
    train_steps(run, range(100, 102))
    return run.result()


def fail_in_turn(fabric: syncline.Fabric, cases: Sequence[Failing]) -> list[Result]:
    return [fail_and_go_on(fabric, failing) for failing in cases]


def without_failed_steps(failing: Failing, world: int) -> Result:
    """As if the batches of the steps in which a rank failed had not been there."""
    never = failing_scenario(replace(failing, ranks=frozenset()))
    run = Run(never, range(world), world, seed=0)
    train_steps(run, [step for step in range(STEPS + 2) if step not in failing.steps])
    return run.result()


def without_failed_batches(failing: Failing, world: int) -> Result:
    """As if the batches that failed said nothing about any parameter."""
    never = failing_scenario(replace(failing, ranks=frozenset()))
    run = Run(never, range(world), world, seed=0)
    for step in range(STEPS + 2):
        run.ranks = [rank for rank in range(world) if not failing.trap(Batch(rank, step))]
        run.zero_grad()
        if run.ranks:
            (run.loss(step) * len(run.ranks) / world).backward()
        run.step()
    return run.result()


def fail_in_one_of_two_backwards(fabric: syncline.Fabric, failing: Failing, first: bool) -> Result:
    """Two backward passes for each step, of which one fails; after the second a rank may go on with the next step."""
    run = SyncRun(failing_scenario(failing), fabric)
    for step in range(STEPS + 2):
        run.zero_grad()
        failed = False
        for number in (step, 100 + step) if first else (100 + step, step):
            try:
                run.backward(number)
            except Boom:
                failed = True
        if not failed or failing.then == "step":
            run.step()
    return run.result()


def two_backwards_without_failed_steps(failing: Failing, world: int) -> Result:
    never = failing_scenario(replace(failing, ranks=frozenset()))
    run = Run(never, range(world), world, seed=0)
    for step in range(STEPS + 2):
        if step not in failing.steps:
            run.zero_grad()
            run.backward(step)
            run.backward(100 + step)
            run.step()
    return run.result()
