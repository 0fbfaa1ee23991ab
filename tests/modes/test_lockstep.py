"""Servers that wait for all workers do synchronous SGD."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.guarded import filled
from support.models import mlp
from support.served import (
    LOCKSTEP,
    LOOPS,
    MAKERS,
    STEPS,
    How,
    equal,
    in_single,
    plain,
    with_an_exception,
    with_nan,
)
from syncline.modes.serving.clock import Clock


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("servers", ["servers=1", "servers=2"])
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_with_a_bound_of_0_it_is_synchronous_bit_for_bit(world: int, servers: str, optimizer: str) -> None:
    wanted = syncline.run(partial(plain, how=How("sync", optimizer=optimizer)), ranks=world, fabric="threads")
    how = How(f"{LOCKSTEP},{servers}", optimizer=optimizer)
    for found in syncline.run(partial(plain, how=how), ranks=world, fabric="threads"):
        assert equal(found, wanted[0])


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("workers", [1, 3])
def test_servers_apart_do_the_same(workers: int, optimizer: str) -> None:
    wanted = syncline.run(partial(plain, how=How("sync", optimizer=optimizer)), ranks=workers, fabric="threads")
    how = How(f"{LOCKSTEP},servers=2,apart=true", optimizer=optimizer)
    found = syncline.run(partial(plain, how=how), ranks=workers + 2, fabric="threads")
    assert all(equal(one, wanted[0]) for one in found[:workers])


@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.1"])
def test_lockstep_is_deterministic(codec: str) -> None:
    how = How(f"{LOCKSTEP},servers=2", codec=codec)
    first, again = (syncline.run(partial(in_single, how=how), ranks=3, fabric="threads") for _ in range(2))
    assert all(equal(one, first[0]) for one in [*first, *again])


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_every_loop_does_what_it_does_in_step(name: str, optimizer: str) -> None:
    loop = LOOPS[name]
    wanted = syncline.run(partial(loop, how=How("sync", optimizer=optimizer)), ranks=2, fabric="threads")
    found = syncline.run(
        partial(loop, how=How(f"{LOCKSTEP},servers=2", optimizer=optimizer)), ranks=2, fabric="threads"
    )
    assert all(equal(one, wanted[0]) for one in found)


@pytest.mark.parametrize("codec", ["topk:0.1", "int8", "onebit", "powersgd:1"])
def test_a_step_that_all_skip_leaves_what_is_kept_and_the_state_of_codecs_alone(codec: str) -> None:
    """The worker that was not at fault had pushed already: it is as if the step had not been."""

    def without_the_step(fabric: syncline.Fabric) -> list[Tensor]:
        how = How(LOCKSTEP, codec=codec, optimizer="sgd")
        return with_nan(fabric, how)

    def never_was(fabric: syncline.Fabric) -> list[Tensor]:
        return steps_without(fabric, How(LOCKSTEP, codec=codec, optimizer="sgd"), 2)

    found = syncline.run(without_the_step, ranks=2, fabric="threads")
    wanted = syncline.run(never_was, ranks=2, fabric="threads")
    assert equal(found[0], wanted[0])
    assert equal(found[0], found[1])


def steps_without(fabric: syncline.Fabric, how: How, left_out: int) -> list[Tensor]:
    """The loop of `with_nan` without one of its steps."""
    from support.batches import Batch
    from support.served import fill, one_step, values_of

    model = fill(mlp(torch.float32), seed=fabric.rank)
    optimizer = how.make(model.parameters())
    sync = how.sync(fabric, model, optimizer)
    for step in range(STEPS):
        if step != left_out:
            one_step(model, optimizer, Batch(fabric.rank, step))
    sync.close()
    return values_of(model)


@pytest.mark.parametrize("where", ["in forward", "before all gradients", "after most gradients", "after all gradients"])
def test_an_exception_of_one_worker_costs_one_step(where: str) -> None:
    loop = partial(with_an_exception, where=where)
    wanted = syncline.run(partial(loop, how=How("sync")), ranks=2, fabric="threads")
    found = syncline.run(partial(loop, how=How(LOCKSTEP)), ranks=2, fabric="threads")
    assert all(equal(one, wanted[0]) for one in found)


def test_parameters_that_no_worker_uses_have_no_state_at_the_server() -> None:
    def work(fabric: syncline.Fabric) -> set[str]:
        model = filled(nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)}))
        optimizer = MAKERS["adamw"](model.parameters())
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async")
        for _ in range(2):
            optimizer.zero_grad()
            model["used"](torch.ones(1, 2)).sum().backward()
            optimizer.step()
        sync.drain()
        server = sync.driver.server
        names = set().union(*(server.optimizer_state(one) for one in server.optimizers)) if server else set()
        sync.close()
        return names

    assert syncline.run(work, ranks=2, fabric="threads")[0] == {"used.weight", "used.bias"}


def test_a_worker_that_is_slow_to_come_is_in_the_first_round() -> None:
    """The others have committed their first step before it has entered."""
    entered = Clock([0, 1], 0)
    entered.tick(0, 1)
    assert entered.enter(1) == 0
    assert entered.enter(0) == 1
