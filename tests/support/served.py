"""What ranks of a job with parameter servers do in tests. Light: ranks import it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import syncline
from support.batches import Batch, fill
from support.losses import squared
from support.models import Boom, Branches, MixedTypes, Trapped, frozen_below, mlp
from support.runs import SMALL_BUCKETS

STEPS = 6
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(AdamW, lr=0.05),
}


@dataclass(frozen=True)
class How:
    """The settings of a `Sync`, and how its optimizer is made."""

    mode: str
    codec: str = "none"
    optimizer: str = "momentum"
    accumulate: int = 1

    def sync(
        self, fabric: syncline.Fabric, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **more: Any
    ) -> syncline.Sync:
        chosen = {"collective": "direct", "accumulate": self.accumulate, **SMALL_BUCKETS, **more}
        return syncline.Sync(model, optimizer, fabric=fabric, mode=self.mode, codec=self.codec, **chosen)

    def make(self, parameters: Any) -> Optimizer:
        return MAKERS[self.optimizer](parameters)


LOCKSTEP = "bounded:ahead=0"


def values_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Loops as users write them. Each returns the parameters, and runs with any mode.

Loop = Callable[[syncline.Fabric, How], list[Tensor]]


def trained(
    fabric: syncline.Fabric,
    how: How,
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor] = squared,
    steps: int = STEPS,
    drains: bool = False,
) -> list[Tensor]:
    """One backward pass and one step, again and again."""
    fill(model, seed=fabric.rank)
    optimizer = how.make(model.parameters())
    sync = how.sync(fabric, model, optimizer)
    if not sync.serve():
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, Batch(fabric.rank, step)).backward()
            optimizer.step()
        if drains:
            sync.drain()
    sync.close()
    return values_of(model)


def in_float32(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x.float()) - batch.y.float()).square().mean()


def plain(fabric: syncline.Fabric, how: How, steps: int = STEPS) -> list[Tensor]:
    return trained(fabric, how, mlp(), steps=steps)


def in_single(fabric: syncline.Fabric, how: How, steps: int = STEPS) -> list[Tensor]:
    """In float32, as codecs work in it."""
    return trained(fabric, how, mlp(torch.float32), in_float32, steps, drains=True)


def with_schedule_and_groups(fabric: syncline.Fabric, how: How) -> list[Tensor]:
    model = fill(mlp(), seed=fabric.rank)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2:].parameters()), "lr": 0.02}]
    optimizer = how.make(groups)
    schedule = StepLR(optimizer, 2, 0.5)
    sync = how.sync(fabric, model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        squared(model, Batch(fabric.rank, step)).backward()
        optimizer.step()
        schedule.step()
    sync.close()
    return values_of(model)


def with_two_optimizers(fabric: syncline.Fabric, how: How) -> list[Tensor]:
    model = fill(mlp(), seed=fabric.rank)
    optimizers = [how.make(model[0].parameters()), AdamW(model[2:].parameters(), lr=0.01)]
    sync = how.sync(fabric, model, optimizers)
    for step in range(STEPS):
        model.zero_grad()
        squared(model, Batch(fabric.rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    sync.close()
    return values_of(model)


def alike_and_clipped(fabric: syncline.Fabric, how: How, limit: float = 0.05) -> list[Tensor]:
    """All ranks have the same data, so that clipping before or after averaging is the same."""
    model = fill(mlp(), seed=fabric.rank)
    optimizer = how.make(model.parameters())
    sync = how.sync(fabric, model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        squared(model, Batch(0, step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    sync.close()
    return values_of(model)


def accumulated(fabric: syncline.Fabric, how: How) -> list[Tensor]:
    model = fill(mlp(), seed=fabric.rank)
    optimizer = how.make(model.parameters())
    sync = how.sync(fabric, model, optimizer, accumulate=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            squared(model, Batch(fabric.rank, 3 * step + part)).backward()
        optimizer.step()
    sync.close()
    return values_of(model)


def with_no_sync(fabric: syncline.Fabric, how: How) -> list[Tensor]:
    model = fill(mlp(), seed=fabric.rank)
    optimizer = how.make(model.parameters())
    sync = how.sync(fabric, model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with sync.no_sync() if not part else nullcontext():
                squared(model, Batch(fabric.rank, 2 * step + part)).backward()
        optimizer.step()
    sync.close()
    return values_of(model)


def with_unused(fabric: syncline.Fabric, how: How) -> list[Tensor]:
    """`never` has no gradient anywhere, and weight decay must not move it; others are used by some, sometimes."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        is_its_turn = batch.rank == batch.step % fabric.world
        names = ["always", *["sometimes"] * (batch.step % 2), *["here_and_there"] * is_its_turn]
        return (model(batch.x, names) - batch.y).square().mean()

    return trained(fabric, how, Branches(), loss)


def with_frozen(fabric: syncline.Fabric, how: How) -> list[Tensor]:
    return trained(fabric, how, frozen_below())


def with_mixed_types(fabric: syncline.Fabric, how: How) -> list[Tensor]:
    return trained(fabric, how, MixedTypes())


def with_nan(fabric: syncline.Fabric, how: How) -> list[Tensor]:
    """One worker has a NaN in one step; float32, because codecs keep that much."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return in_float32(model, batch) * (float("nan") if (batch.rank, batch.step) == (1, 2) else 1.0)

    return trained(fabric, how, mlp(torch.float32), loss)


def with_an_exception(fabric: syncline.Fabric, how: How, where: str = "between gradients") -> list[Tensor]:
    """One worker fails in one step, catches it, and goes on with its step."""
    model = fill(Trapped(), seed=fabric.rank)
    optimizer = how.make(model.parameters())
    sync = how.sync(fabric, model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = Batch(fabric.rank, step)
        armed = where if (fabric.rank, step) == (1, 2) else ""
        with suppress(Boom):
            (model(batch.x, armed) - batch.y).square().mean().backward()
        optimizer.step()
    sync.close()
    return values_of(model)


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "schedule and groups": with_schedule_and_groups,
    "two optimizers": with_two_optimizers,
    "clipped": alike_and_clipped,
    "accumulated": accumulated,
    "no_sync": with_no_sync,
    "unused": with_unused,
    "frozen": with_frozen,
    "mixed types": with_mixed_types,
    "nan": with_nan,
    "exception": with_an_exception,
}


# Checkpoints


def resumed(fabric: syncline.Fabric, how: How, other: str, stop: int) -> list[Tensor]:
    """Train, save at `stop`, build everything anew with another mode, load, and train on."""
    how_now, model, optimizer, sync = how, *begin(fabric, how)
    for step in range(STEPS):
        if step == stop:
            saved = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict(), sync.state_dict()), saved)
            if other:
                sync.close()
                how_now = How(other, how.codec, how.optimizer)
                model, optimizer, sync = begin(fabric, how_now)
                saved.seek(0)
                of_model, of_optimizer, of_sync = torch.load(saved, weights_only=True)
                model.load_state_dict(of_model)
                optimizer.load_state_dict(of_optimizer)
                sync.load_state_dict(of_sync)
        one_step(model, optimizer, Batch(fabric.rank, step))
    sync.close()
    return values_of(model)


def begin(fabric: syncline.Fabric, how: How) -> tuple[nn.Module, Optimizer, syncline.Sync]:
    model = fill(mlp(torch.float32, width=24), seed=3)
    optimizer = how.make(model.parameters())
    return model, optimizer, how.sync(fabric, model, optimizer)


def one_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    in_float32(model, batch).backward()
    optimizer.step()


def save(fabric: syncline.Fabric, how: How, steps: int) -> tuple[dict, list[Tensor]]:
    """Train and save."""
    model, optimizer, sync = begin(fabric, how)
    if not sync.serve():
        for step in range(steps):
            one_step(model, optimizer, Batch(fabric.rank, step))
    saved = sync.state_dict()
    found = values_of(model)
    sync.close()
    return saved, found


def load(fabric: syncline.Fabric, how: How, states: list[dict], steps: int) -> tuple[list[Tensor], list[Tensor], dict]:
    """Parameters as they were saved, after some more steps on the same batch, and what is kept after that."""
    model, optimizer, sync = begin(fabric, how)
    sync.load_state_dict(states)
    before = values_of(model)
    for step in range(steps):
        one_step(model, optimizer, Batch(0, 100 + step))
    saved = sync.state_dict()
    sync.close()
    return before, values_of(model), saved
