"""Workers of servers whose gradients are known, so that it is known where parameters are. Light: ranks import it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import SGD

import syncline
from syncline.modes.serving.clock import Read

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
    kept = [state["residual"].get(name, torch.zeros(p.numel())) for name, p in model.named_parameters()]
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
