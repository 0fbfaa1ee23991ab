"""Models that ranks train in tests of the safety of `Sync`, and how. Light: ranks import it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import syncline
from syncline.errors import PeerError, SynclineError
from syncline.fabric.base import Fabric
from syncline.tracing.totals import Totals

ONE_EACH = {"first_bucket_bytes": 1, "bucket_bytes": 1}  # a bucket for every parameter
ADAMW = partial(torch.optim.AdamW, lr=0.05, foreach=False)
NOTE_S = 1.3  # after which a note has reached the store of the torch fabric


class Net(nn.Module):
    """Three layers: gradients come for `third` first and for `first` last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Words(nn.Module):
    """A table whose gradient is sparse, and a layer whose gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)
        self.last = nn.Linear(6, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.table(words))


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """With the same numbers whatever the global generator does: ranks that are threads share it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def batch(rank: int, step: int, rows: int = 5) -> Tensor:
    """Different on every rank and in every step."""
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def words(rank: int, step: int) -> Tensor:
    """Different on every rank and in every step, with some that all ranks have."""
    return torch.tensor([0, 1 + rank, (3 * step + rank) % 10, 9])


def snapshot(model: nn.Module) -> list[Tensor]:
    """The parameters as they are now."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of the optimizer as they are now."""
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return [tensor.clone() for tensor in tensors]


@dataclass
class Trained:
    """What one rank has to say after training."""

    parameters: list[list[Tensor]] = field(default_factory=list)  # at the start and after each step
    states: list[list[Tensor]] = field(default_factory=list)  # of the optimizer, after each step
    gradients: list[list[Tensor | None]] = field(default_factory=list)  # after each step
    error: str = ""  # the name of its type
    message: str = ""
    culprit: int | None = None
    at_the_end: list[Tensor] = field(default_factory=list)  # parameters, also after an error
    buckets: list[list[str]] = field(default_factory=list)
    totals: Totals | None = None
    seconds: float = 0.0


Poison = Callable[[int, int, nn.Module, Tensor], Tensor]  # rank, step, model, loss -> loss


def unchanged(rank: int, step: int, model: nn.Module, loss: Tensor) -> Tensor:
    return loss


def train(
    fabric: Fabric,
    steps: int,
    *,
    build: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = ADAMW,
    data: Callable[[int, int], Tensor] = batch,
    poison: Poison = unchanged,
    before_step: Callable[[int, int, nn.Module, Optimizer], None] | None = None,
    prepare: Callable[[int, nn.Module], None] | None = None,
    **settings: object,
) -> Trained:
    """Train, and stop at the first error of Syncline's."""
    model = filled(build())
    if prepare is not None:
        prepare(fabric.rank, model)
    chosen = optimizer(model.parameters())
    trained = Trained(parameters=[snapshot(model)])
    started = time.monotonic()
    try:
        sync = syncline.Sync(model, chosen, fabric=fabric, **settings)
        trained.parameters = [snapshot(model)]
        for step in range(1, steps + 1):
            if before_step is not None:
                before_step(fabric.rank, step, model, chosen)
            chosen.zero_grad()
            started = time.monotonic()
            loss = model(data(fabric.rank, step)).square().mean()
            poison(fabric.rank, step, model, loss).backward()
            chosen.step()
            trained.parameters.append(snapshot(model))
            trained.states.append(state_of(chosen))
            trained.gradients.append([copy_of(parameter.grad) for parameter in model.parameters()])
        trained.buckets, trained.totals = sync.buckets, sync.report()
    except SynclineError as error:
        trained.error, trained.message = type(error).__name__, str(error)
        trained.culprit = error.rank if isinstance(error, PeerError) else None
        trained.seconds = time.monotonic() - started
    trained.at_the_end = snapshot(model)
    return trained


def copy_of(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


@dataclass(frozen=True)
class Spoils:
    """The loss of one rank is multiplied by something in some steps."""

    rank: int
    steps: tuple[int, ...]
    factor: float

    def __call__(self, rank: int, step: int, model: nn.Module, loss: Tensor) -> Tensor:
        return loss * self.factor if rank == self.rank and step in self.steps else loss


@dataclass(frozen=True)
class SpoilsTable:
    """The gradient of a sparse table, and of nothing else, is multiplied by something on one rank in one step."""

    rank: int
    step: int
    factor: float

    def __call__(self, rank: int, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        model.table._forward_hooks.clear()
        if (rank, step) == (self.rank, self.step):
            model.table.register_forward_hook(lambda _, __, rows: spoil(rows, self.factor))


def spoil(rows: Tensor, factor: float) -> None:
    rows.register_hook(lambda gradient: gradient * factor)


def train_with_two_optimizers(fabric: Fabric, steps: int, poison: Poison = unchanged, **settings: object) -> Trained:
    """Both make a step after each backward pass."""
    model = filled(Net())
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:3], parameters[3:])]
    sync = syncline.Sync(model, optimizers, fabric=fabric, **settings)
    trained = Trained(parameters=[snapshot(model)])
    try:
        for step in range(1, steps + 1):
            model.zero_grad()
            poison(fabric.rank, step, model, model(batch(fabric.rank, step)).square().mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
            trained.parameters.append(snapshot(model))
        trained.totals = sync.report()
    except SynclineError as error:
        trained.error, trained.message = type(error).__name__, str(error)
    trained.at_the_end = snapshot(model)
    return trained
