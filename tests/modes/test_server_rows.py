"""What is wrong today with parameter servers, beside the loops of `test_parity.py`: right answer, or refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import syncline
from support.batches import Batch, fill
from support.catalogue import PROCESS_FABRICS
from support.losses import squared
from support.models import Pair, mlp
from support.references import same_bits
from support.runs import DEADLINES, SMALL_BUCKETS
from support.trainees import place_of
from syncline.errors import ConfigError, Desync, RankFailed

WORLD = 2
EVERY_FABRIC = ["threads", *(pytest.param(name, marks=pytest.mark.slow) for name in PROCESS_FABRICS)]
MODES = ["async", "bounded:ahead=0", "bounded:ahead=4,servers=2"]


def wrong(row: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"servers: {row}")


def on_ranks(work: Callable[[syncline.Fabric], Any], fabric: str) -> list[Any]:
    """What ranks return; nothing if they refuse."""
    try:
        return syncline.run(work, WORLD, fabric, DEADLINES)
    except RankFailed as failed:
        if all(isinstance(error, (ConfigError, Desync)) for error in failed.failures.values()):
            return []
        raise


# Several optimizers


def adversaries(fabric: syncline.Fabric, mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """One Sync, two optimizers, the usual loop: how far each model has gone, and where both are."""
    model = fill(Pair(), seed=0)
    generator, critic = model.generator, model.critic
    for_generator, for_critic = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
    sync = syncline.Sync(model, [for_generator, for_critic], fabric=fabric, mode=mode)
    before = place_of(generator), place_of(critic)
    for step in range(4):
        batch = Batch(fabric.rank, step)
        for_critic.zero_grad()
        (critic(generator(batch.x).detach()).square().mean() + (critic(batch.y) - 1).square().mean()).backward()
        for_critic.step()
        for_generator.zero_grad()
        (critic(generator(batch.x)) - 1).square().mean().backward()
        for_generator.step()
    sync.drain()
    sync.close()
    return place_of(generator) - before[0], place_of(critic) - before[1], place_of(model)


@wrong("one Sync, two optimizers, GAN loop: nothing is ever trained")
@pytest.mark.parametrize("fabric", EVERY_FABRIC)
@pytest.mark.parametrize("mode", MODES)
def test_both_models_of_a_gan_are_trained(mode: str, fabric: str) -> None:
    ranks = on_ranks(partial(adversaries, mode=mode), fabric)
    for generator, critic, place in ranks:
        assert generator.any()
        assert critic.any()
        assert same_bits(place, ranks[0][2])


def seldom(fabric: syncline.Fabric, mode: str, steps: int) -> tuple[float, float]:
    """How many gradients, all of them 1, each of two parameters has gone; the second one steps every third time."""
    model = nn.ParameterDict({"often": torch.zeros(3), "seldom": torch.zeros(3)})
    optimizers = [SGD([model["often"]], lr=1.0), SGD([model["seldom"]], lr=1.0)]
    sync = syncline.Sync(model, optimizers, fabric=fabric, mode=mode)
    for step in range(steps):
        model.zero_grad()
        (model["often"] + model["seldom"]).sum().backward()
        optimizers[0].step()
        if step % 3 == 2:
            optimizers[1].step()
    sync.drain()
    sync.close()
    return tuple(-float(parameter.detach()[0]) for parameter in (model["often"], model["seldom"]))


@wrong("a second optimizer that steps every third time")
@pytest.mark.parametrize("fabric", EVERY_FABRIC)
@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_steps_more_often_than_another_makes_all_its_steps(mode: str, fabric: str) -> None:
    for often, seldom_ in on_ranks(partial(seldom, mode=mode, steps=6), fabric):
        assert (often, seldom_) == (6.0, 2.0)


# Weights and momenta


@torch.no_grad()
def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.fill_(1.0)


@torch.no_grad()
def clamp(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def load_momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    state["state"] = {
        number: {
            "step": torch.tensor(10.0),
            "exp_avg": torch.full_like(p, 0.5),
            "exp_avg_sq": torch.full_like(p, 0.5),
        }
        for number, p in enumerate(model.parameters())
    }
    optimizer.load_state_dict(state)


CHANGES = {"weights loaded": load, "weights clamped": clamp, "momenta loaded": load_momenta}


def changed_by_all(fabric: syncline.Fabric, mode: str, what: str, after: int) -> Tensor:
    """All ranks do the same after some steps, and have the same data, so that all modes come to the same."""
    model = fill(mlp(), seed=0)
    optimizer = AdamW(model.parameters(), lr=0.01)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, **SMALL_BUCKETS)
    for step in range(4):
        if step == after:
            sync.drain()
            CHANGES[what](model, optimizer)
        optimizer.zero_grad()
        squared(model, Batch(0, step)).backward()
        optimizer.step()
    sync.drain()
    sync.close()
    return place_of(model)


@wrong("weights, momenta or clamps that all ranks apply after Sync are thrown away")
@pytest.mark.parametrize("fabric", EVERY_FABRIC)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("what", CHANGES)
def test_what_all_ranks_apply_is_what_servers_go_on_with(what: str, after: int, fabric: str) -> None:
    work = partial(changed_by_all, what=what, after=after)
    wanted = on_ranks(partial(work, mode="sync"), "threads")[0]
    for found in on_ranks(partial(work, mode="bounded:ahead=0"), fabric):
        torch.testing.assert_close(found, wanted)


# Gradients

WIDE = 1 << 18  # elements of a bucket of which only some are looked at
Change = Callable[[nn.Parameter], None]


def replace_data(parameter: nn.Parameter) -> None:
    parameter.grad.data = 2 * parameter.grad.data


def negate_data(parameter: nn.Parameter) -> None:
    parameter.grad.data.neg_()


def clamp_data(parameter: nn.Parameter) -> None:
    parameter.grad.data.clamp_(max=1.0)


def through_numpy(parameter: nn.Parameter) -> None:
    parameter.grad.numpy()[...] *= -1


EDITS: dict[str, tuple[Change, Callable[[Tensor], Tensor]]] = {
    ".data = ...": (replace_data, lambda gradient: 2 * gradient),
    ".data.neg_()": (negate_data, Tensor.neg),
    ".data.clamp_()": (clamp_data, lambda gradient: gradient.clamp(max=1.0)),
    "numpy": (through_numpy, Tensor.neg),
}


def slopes() -> Tensor:
    """The gradient of all ranks; one in a hundred is large, and of these most are not looked at."""
    gradient = torch.full((WIDE,), 0.5)
    gradient[1::100] = 4.0
    gradient[:: WIDE // (1 << 16)] = 0.5
    return gradient


def edited(fabric: syncline.Fabric, mode: str, how: str, in_hook: bool) -> Tensor:
    """How far all elements have gone in two steps, in gradients; edited in the loop, or by a hook of the step."""
    model = nn.ParameterDict({"wide": torch.zeros(WIDE)})
    optimizer = SGD(model.parameters(), lr=1.0)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    change, _ = EDITS[how]
    if in_hook:
        optimizer.register_step_pre_hook(lambda *_: change(model["wide"]) if model["wide"].grad is not None else None)
    for _ in range(2):
        optimizer.zero_grad()
        (model["wide"] * slopes()).sum().backward()
        if not in_hook:
            change(model["wide"])
        optimizer.step()
    sync.drain()
    sync.close()
    return -model["wide"].detach()


@wrong("gradients changed by .data are ignored")
@pytest.mark.parametrize("fabric", EVERY_FABRIC)
@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("mode", MODES[:2])
def test_gradients_may_be_edited_past_autograd(mode: str, how: str, fabric: str) -> None:
    for gone in on_ranks(partial(edited, mode=mode, how=how, in_hook=False), fabric):
        assert torch.equal(gone, 2 * EDITS[how][1](slopes()))


@wrong("gradients changed by step hooks set after Sync are ignored")
@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("mode", MODES[:2])
def test_gradients_may_be_edited_by_hooks_of_the_step(mode: str, how: str) -> None:
    for gone in on_ranks(partial(edited, mode=mode, how=how, in_hook=True), "threads"):
        assert torch.equal(gone, 2 * EDITS[how][1](slopes()))


# Calls that one rank makes alone


def called_by_one(fabric: syncline.Fabric, mode: str, call: str) -> Tensor:
    """Rank 0 alone saves, or drains, in the middle; where each rank is after all have drained."""
    model = fill(mlp(), seed=0)
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, **SMALL_BUCKETS)
    for step in range(6):
        optimizer.zero_grad()
        squared(model, Batch(fabric.rank, step)).backward()
        optimizer.step()
        if (fabric.rank, step) == (0, 2):
            {"state_dict": sync.state_dict, "drain": sync.drain}[call]()
            time.sleep(0.5)  # whoever was waited for has taken its parameters
    sync.drain()
    found = place_of(model)
    sync.close()
    return found


@wrong("if rank == 0: sync.state_dict() leaves ranks apart after the next drain()")
@pytest.mark.parametrize("fabric", EVERY_FABRIC)
@pytest.mark.parametrize("call", ["state_dict", "drain"])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_are_equal_after_drain_whoever_saves(mode: str, call: str, fabric: str) -> None:
    ranks = on_ranks(partial(called_by_one, mode=mode, call=call), fabric)
    assert all(same_bits(ranks[0], other) for other in ranks[1:])
