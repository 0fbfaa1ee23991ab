"""What ranks of a job with parameter servers do in tests. Light: ranks import it."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from batches import Batch, fill
from losses import squared
from models import Boom, Branches, MixedTypes, Trapped, frozen_below, mlp
from runs import SMALL_BUCKETS
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import syncline
from syncline.modes.serving.clock import Read

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


# In strict turn


@dataclass
class Turns:
    """A token that goes round between threads."""

    world: int
    turn: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, rank: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.turn % self.world == rank, 30.0)

    def pass_on(self) -> None:
        with self.changed:
            self.turn += 1
            self.changed.notify_all()


def in_turn(fabric: syncline.Fabric, turns: Turns, mode: str, rate: float, rounds: int) -> tuple[list[float], dict]:
    """x' = x - rate * x, pushed in strict turn: what this worker reads, and how stale it was."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    optimizer = SGD(model.parameters(), lr=rate)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    path = []
    for _ in range(rounds):
        optimizer.zero_grad()
        model.weight.square().sum().div(2).backward()
        turns.take(fabric.rank)
        optimizer.step()
        path.append(model.weight.item())
        turns.pass_on()
    fabric.barrier()
    staleness = dict(sync.staleness().counts)
    sync.close()
    return path, staleness


# Constant gradients: the sum of what was committed is where the parameters are

RATE = 2.0**-6  # all numbers are exact in float32, in whatever order they are added
START = 8.0


class Line(nn.Module):
    """Its gradient is the slope it is given."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((size,), START))
        self.second = nn.Parameter(torch.full((size, 2), START))

    def forward(self, slope: float) -> Tensor:
        return slope * (self.first.sum() + self.second.sum())


def slope_of(rank: int) -> float:
    return 1.0 + rank


def gone(expected_slopes: float) -> Tensor:
    return torch.full((9,), START - RATE * expected_slopes)


@dataclass(frozen=True)
class Descent:
    """Steps of constant gradients on every worker."""

    mode: str
    steps: tuple[int, ...]  # of every worker
    codec: str = "none"
    delays_s: float = 0.0  # up to so long before a step, drawn by every worker for itself
    drain: bool = True
    deadlines: syncline.Deadlines | None = None

    def __call__(self, fabric: syncline.Fabric) -> tuple[Tensor, list[Read]]:
        """Where the parameters end, at the server if not drained, and what was read at the server of this rank."""
        model = Line()
        optimizer = SGD(model.parameters(), lr=RATE)
        options = {"first_bucket_bytes": 16, "bucket_bytes": 64}
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode=self.mode, codec=self.codec, **options)
        draws = torch.Generator().manual_seed(fabric.rank)
        if not sync.serve():
            for _ in range(self.steps[fabric.rank]):
                time.sleep(self.delays_s * torch.rand((), generator=draws).item() ** 4)
                optimizer.zero_grad()
                model(slope_of(fabric.rank)).backward()
                optimizer.step()
            if self.drain:
                sync.drain()
        server = sync.driver.server
        sync.close()
        named = server.parameters if server is not None and not self.drain else dict(model.named_parameters())
        place = torch.cat([p.detach().flatten() for _, p in sorted(named.items())])
        return place, list(server.clock.reads if server else [])


def read_and_hurry(fabric: syncline.Fabric, mode: str, steps: int, slow: int, seconds: float) -> list[Read]:
    """One worker is slow; what was read at the server of this rank."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    draws = torch.Generator().manual_seed(100 + fabric.rank)
    for _ in range(steps):
        time.sleep(seconds * ((fabric.rank == slow) + 0.3 * torch.rand((), generator=draws).item()))
        optimizer.zero_grad()
        model(slope_of(fabric.rank)).backward()
        optimizer.step()
    sync.drain()
    server = sync.driver.server
    sync.close()
    return list(server.clock.reads) if server else []


# Away


def away_and_back(
    fabric: syncline.Fabric, gate: threading.Barrier, mode: str, steps: int, away_s: float
) -> tuple[Tensor, Tensor, float]:
    """Rank 1 makes one step, is away while the others make all of theirs, and comes back for one more.

    What it had when it came back, what everyone had at the end, and how long a step of the others took at most.
    """
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)

    def step() -> None:
        optimizer.zero_grad()
        model(slope_of(fabric.rank)).backward()
        optimizer.step()

    step()
    took_s = 0.0
    back = torch.zeros(1)
    if fabric.rank == 1:
        with sync.away():
            gate.wait()
            gate.wait()
        back = model.first.detach().clone()
    else:
        gate.wait()
        for _ in range(steps):
            began = time.monotonic()
            step()
            took_s = max(took_s, time.monotonic() - began)
            time.sleep(away_s / steps)
        gate.wait()
    gate.wait()
    step()
    sync.drain()
    found = model.first.detach().clone()
    sync.close()
    return back, found, took_s


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
                of_model, of_optimizer, of_sync = torch.load(saved, weights_only=False)
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


# Scaled losses


def scaled(fabric: syncline.Fabric, steps: int, infinite: int, codec: str, explicit: bool) -> tuple[Tensor, Tensor]:
    """A scaler that grows every step; one worker overflows once. What was gone, and what is still kept."""
    model = Line(40)
    optimizer = SGD(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async", codec=codec, scaler=scaler)
    draws = torch.Generator().manual_seed(fabric.rank)
    for step in range(steps):
        optimizer.zero_grad()
        slopes = [torch.randn(p.shape, generator=draws) for p in model.parameters()]
        loss = sum((p * slope).sum() for p, slope in zip(model.parameters(), slopes, strict=True))
        factor = float("inf") if (fabric.rank, step) == (1, infinite) else 1.0
        scaler.scale(loss * factor).backward()
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    sync.drain()
    state = sync.driver.push.state_dict()
    kept = [state["kept"].get(name, torch.zeros(p.numel())) for name, p in model.named_parameters()]
    gone = torch.cat([START - p.detach().flatten() for p in model.parameters()])
    sync.close()
    return gone, torch.cat(kept) * RATE


def slopes_drawn(rank: int, steps: int, without: int) -> Tensor:
    """The sum of what `scaled` draws on a rank."""
    draws = torch.Generator().manual_seed(rank)
    total = torch.zeros(120)
    for step in range(steps):
        slopes = torch.cat([torch.randn(p.shape, generator=draws).flatten() for p in Line(40).parameters()])
        total += slopes * (step != without)
    return total
