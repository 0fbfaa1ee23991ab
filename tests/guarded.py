"""What ranks do in tests of the safety of `Sync`. Light, because every process of a rank imports it: no pytest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from workers import be_killed, be_stopped, report_and_stay, wait_for_reports

import syncline
from syncline.errors import PeerError, SynclineError
from syncline.fabric.base import Fabric

ONE_EACH = {"first_bucket_bytes": 1, "bucket_bytes": 1}  # a bucket for every parameter
NOTE_S = 1.5  # after which a note has reached the store of the torch fabric


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
    totals: syncline.tracing.totals.Totals | None = None
    seconds: float = 0.0


Poison = Callable[[int, int, nn.Module, Tensor], Tensor]  # rank, step, model, loss -> loss


def unchanged(rank: int, step: int, model: nn.Module, loss: Tensor) -> Tensor:
    return loss


def train(
    fabric: Fabric,
    steps: int,
    *,
    build: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = partial(torch.optim.AdamW, lr=0.05, foreach=False),
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


# Faults


def arm_forward(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    model.second.register_forward_pre_hook(lambda *_: strike())


def arm_start_of_backward(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    """Before any gradient of a parameter is there."""
    model.third.register_forward_hook(lambda _, __, output: watch(output, strike))


def arm_between_buckets(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    """When the gradients of `third` have been sent, and before those of `second` are there."""
    model.second.register_forward_hook(lambda _, __, output: watch(output, strike))


def arm_optimizer(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    """Inside of the step, when `Sync` has let the gradients through."""
    optimizer.register_step_pre_hook(lambda *_: strike())


def watch(output: Tensor, strike: Callable[[], None]) -> None:
    output.register_hook(lambda _: strike())


PLACES = {
    "forward": arm_forward,
    "start of backward": arm_start_of_backward,
    "between buckets": arm_between_buckets,
    "optimizer": arm_optimizer,
}


@dataclass(frozen=True)
class Strikes:
    """Something befalls a rank at a place of a step."""

    victim: int
    step: int
    place: str
    strike: Callable[[], None]

    def __call__(self, rank: int, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if (rank, step) == (self.victim, self.step):
            PLACES[self.place](model, optimizer, self.strike)


def after_its_note(strike: Callable[[], None]) -> None:
    """Let the others be able to read how far this rank has come, then strike."""
    time.sleep(NOTE_S)
    strike()


killed = be_killed
killed_later = partial(after_its_note, be_killed)
stopped_later = partial(after_its_note, be_stopped)


def train_with_a_victim(fabric: Fabric, fault: Strikes, steps: int, folder: str) -> Trained:
    """Train until the victim is struck; when all others have said what they saw, the victim is removed."""
    pids = fabric.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
    trained = train(fabric, steps, before_step=fault, **ONE_EACH)
    if fabric.rank != fault.victim:
        report_and_stay(fabric, folder)
        remove(pids[fault.victim])
    return trained


def train_with_an_absent_rank(fabric: Fabric, absent: int, step: int, folder: str) -> Trained:
    """One rank never comes to the backward pass of a step until the others have given up on it."""
    away = partial(wait_for_reports, folder, fabric.world - 1)
    trained = train(fabric, step, before_step=Strikes(absent, step, "forward", away), **ONE_EACH)
    if fabric.rank != absent:
        report_and_stay(fabric, folder)
    return trained


def remove(pid: int) -> None:
    """A stopped process would be waited for."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


# Endings


def train_until_interrupted(fabric: Fabric, folder: str) -> None:
    """Train for ever; leave a file named after this process once steps are being made."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    syncline.Sync(model, optimizer, fabric=fabric, **ONE_EACH)
    for step in range(1_000_000):
        optimizer.zero_grad()
        model(batch(fabric.rank, step)).square().mean().backward()
        optimizer.step()
        if step == 3:
            Path(folder, str(os.getpid())).touch()


def fail_in_backward(fabric: Fabric, rank: int, error: type[BaseException]) -> None:
    """A rank fails in the middle of its third backward pass, and nobody catches anything."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    syncline.Sync(model, optimizer, fabric=fabric, **ONE_EACH)
    for step in range(1, 6):
        if (fabric.rank, step) == (rank, 3):
            arm_between_buckets(model, optimizer, partial(fail, error))
        optimizer.zero_grad()
        model(batch(fabric.rank, step)).square().mean().backward()
        optimizer.step()


def fail(error: type[BaseException]) -> None:
    raise error("in the middle of backward")


def train_and_go_on_alone(fabric: Fabric) -> tuple[Trained, list[list[Tensor]], list[Tensor]]:
    """Two steps together, two alone after `close`; also what one rank alone makes of the same."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, **ONE_EACH)
    trained = Trained()
    for step in range(1, 5):
        if step == 3:
            sync.close()
            sync.close()
            alone = filled(Net())
            alone.load_state_dict(model.state_dict())
            other = torch.optim.SGD(alone.parameters(), lr=0.1)
        one_step(model, optimizer, batch(fabric.rank, step))
        if step > 2:
            one_step(alone, other, batch(fabric.rank, step))
        trained.parameters.append(snapshot(model))
    trained.totals = sync.report()
    return trained, snapshot(alone), [torch.tensor(len(optimizer._optimizer_step_pre_hooks))]


def one_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
