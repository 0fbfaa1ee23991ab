"""Ranks that train in any mode, and the same worked out by hand in one process. Light: ranks import it."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import syncline
from support.batches import Batch, fill
from support.losses import squared
from support.models import mlp
from support.striking import be_killed, report_and_stay
from syncline.errors import PeerError, SynclineError

PLAIN = partial(SGD, lr=0.1)
HEAVY = partial(SGD, lr=0.05, momentum=0.9)
ADAM = partial(AdamW, lr=0.01)
DEADLINES = syncline.Deadlines(20.0, join=60.0)
SMALL_BUCKETS = {"first_bucket_bytes": 256, "bucket_bytes": 1024}

Make = Callable[..., Optimizer]


class Trainee:
    """One rank, its model and its `Sync`."""

    def __init__(
        self,
        fabric: syncline.Fabric,
        mode: str,
        optimizer: Make = HEAVY,
        build: Callable[[], nn.Module] = mlp,
        scale: float = 0.0,
        **settings: Any,
    ) -> None:
        """With a `scale` there is a GradScaler."""
        self.fabric = fabric
        self.model = fill(build(), seed=fabric.rank)
        self.optimizer = optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000) if scale else None
        self.sync = syncline.Sync(
            self.model,
            self.optimizer,
            fabric=fabric,
            mode=mode,
            scaler=self.scaler,
            **(SMALL_BUCKETS | settings),
        )
        self.done = 0

    def loss(self, step: int | None = None) -> Tensor:
        return squared(self.model, Batch(self.fabric.rank, self.done if step is None else step))

    def backward(self, factor: float = 1.0) -> None:
        loss = self.loss() * factor
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.done += 1

    def step(self, factor: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        self.backward(factor)
        self.update()
        return self.place()

    def train(self, steps: int) -> list[Tensor]:
        """Where it is after every step."""
        return [self.step() for _ in range(steps)]

    def place(self) -> Tensor:
        return place_of(self.model)

    def state(self) -> list[Tensor]:
        """Of the optimizer."""
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.clone() for value in values if isinstance(value, Tensor)]

    def drained(self) -> Tensor:
        self.sync.drain()
        return self.place()

    def evaluated(self) -> Tensor:
        """After a forward that is no training."""
        self.model.eval()
        with torch.no_grad():
            self.loss()
        self.model.train()
        return self.place()


def place_of(model: nn.Module) -> Tensor:
    """All parameters in a row, in float64."""
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def start() -> nn.Sequential:
    """What all ranks begin with."""
    return fill(mlp(), seed=0)


# By hand


def gradients_of(model: nn.Module, ranks: Sequence[int], step: int) -> list[Tensor]:
    """Means over the batches of some ranks."""
    losses = [squared(model, Batch(rank, step)) for rank in ranks]
    return list(torch.autograd.grad(sum(losses[1:], losses[0]) / len(losses), list(model.parameters())))


def give(model: nn.Module, gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def delayed_by_hand(world: int, steps: int, make: Make, lag: int = 1, warmup: int = 0) -> list[Tensor]:
    """After every step, and after the last gradients; those of the first steps are used at once."""
    model = start()
    optimizer = make(model.parameters())
    waiting: list[list[Tensor]] = []
    path = []
    for step in range(steps):
        waiting.append(gradients_of(model, range(world), step))
        if len(waiting) > (lag if step >= warmup else 0):
            give(model, waiting.pop(0))
            optimizer.step()
        path.append(place_of(model))
    for gradients in waiting:
        give(model, gradients)
        optimizer.step()
    return [*path, place_of(model)]


class Alone:
    """All ranks of a periodic mode, in one process."""

    def __init__(self, world: int, make: Make) -> None:
        self.models = [start() for _ in range(world)]
        self.optimizers = [make(model.parameters()) for model in self.models]
        self.done = 0

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                give(model, gradients_of(model, [rank], self.done))
                optimizer.step()
            self.done += 1

    def copies(self, name: str) -> list[Tensor]:
        return [model.get_parameter(name).data for model in self.models]

    def mean(self, name: str) -> Tensor:
        return torch.stack(self.copies(name)).mean(0)

    def average(self) -> None:
        for name, _ in self.models[0].named_parameters():
            mean = self.mean(name)
            for copied in self.copies(name):
                copied.copy_(mean)

    def places(self) -> list[Tensor]:
        return [place_of(model) for model in self.models]


class Streamed(NamedTuple):
    """DiLoCo by hand: fragments are lists of names."""

    every: int
    fragments: Sequence[Sequence[str]]
    delay: int
    merge: float
    lr: float
    momentum: float

    def run(self, world: int, steps: int, make: Make) -> list[list[Tensor]]:
        """Where every rank is after every step. The outer optimizer is torch's."""
        ranks = Alone(world, make)
        anchors = {name: nn.Parameter(p.detach().clone()) for name, p in ranks.models[0].named_parameters()}
        outer = [
            SGD([anchors[name] for name in names], self.lr, self.momentum, nesterov=self.momentum > 0)
            for names in self.fragments
        ]
        turn = self.every // len(self.fragments)
        path = []
        for step in range(1, steps + 1):
            ranks.train()
            number = (step - 1) // turn % len(self.fragments)
            names = self.fragments[number]
            if step % turn == (turn - self.delay) % turn:
                for name in names:
                    anchors[name].grad = anchors[name].detach() - ranks.mean(name)
            if step % turn == 0:
                outer[number].step()
                for name in names:
                    for copied in ranks.copies(name):
                        copied.copy_((1 - self.merge) * anchors[name].detach() + self.merge * copied)
            path.append(ranks.places())
        return path


# On every fabric


class Case(NamedTuple):
    """A mode and a codec, and how often ranks must be equal."""

    mode: str
    codec: str
    alike_every: int  # steps; 0: only after drain


def train_cases(fabric: syncline.Fabric, cases: Sequence[Case], steps: int) -> list[list[Tensor]]:
    """For every case the places after each step and after draining."""
    paths = []
    for case in cases:
        trainee = Trainee(fabric, case.mode, codec=case.codec, optimizer=ADAM)
        paths.append([*trainee.train(steps), trainee.drained()])
        trainee.sync.close()
    return paths


# Saved and restored


def through_a_file(saved: Any) -> Any:
    """As a checkpoint is read that nobody trusts."""
    stream = io.BytesIO()
    torch.save(saved, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def checkpoint_of(trainee: Trainee) -> dict[str, Any]:
    saved = {
        "model": trainee.model.state_dict(),
        "optimizer": trainee.optimizer.state_dict(),
        "sync": trainee.sync.state_dict(),
        "scaler": trainee.scaler.state_dict() if trainee.scaler is not None else None,
    }
    return through_a_file(saved)


def restore(trainee: Trainee, saved: dict[str, Any], done: int) -> None:
    trainee.model.load_state_dict(saved["model"])
    trainee.optimizer.load_state_dict(saved["optimizer"])
    trainee.sync.load_state_dict(saved["sync"])
    if trainee.scaler is not None:
        trainee.scaler.load_state_dict(saved["scaler"])
    trainee.done = done


def go_on_from_a_checkpoint(fabric: syncline.Fabric, make: Callable[..., Trainee], at: int, steps: int) -> list[Tensor]:
    """The places after every step from `at` on, and after draining, of a run that is interrupted there."""
    first = make(fabric)
    first.train(at)
    saved = checkpoint_of(first)
    first.train(2)  # what is saved must not change any more
    first.sync.close()
    again = make(fabric)
    restore(again, copy.deepcopy(saved), at)
    path = [*again.train(steps - at), again.drained()]
    again.sync.close()
    return path


def go_on(fabric: syncline.Fabric, make: Callable[..., Trainee], at: int, steps: int) -> list[Tensor]:
    """The same, not interrupted."""
    trainee = make(fabric)
    path = [*trainee.train(steps), trainee.drained()][at:]
    trainee.sync.close()
    return path


# Ranks that die


class Ending(NamedTuple):
    """What a survivor saw."""

    kind: str
    culprit: int | None
    message: str
    seconds: float


def train_until_one_is_killed(
    fabric: syncline.Fabric, mode: str, codec: str, victim: int, at: int, place: str, folder: str
) -> Ending:
    """A rank is killed in a step, before its forward or after its backward; the others go on for a while."""
    trainee = Trainee(fabric, mode, codec=codec)
    began = time.monotonic()
    try:
        for step in range(at + 10):
            struck = fabric.rank == victim and step == at
            began = time.monotonic() if step == at else began
            if struck and place == "before forward":
                be_killed()
            trainee.optimizer.zero_grad()
            trainee.backward()
            if struck:
                be_killed()
            trainee.update()
        ending = Ending("", None, "nothing happened", time.monotonic() - began)
    except SynclineError as error:
        culprit = error.rank if isinstance(error, PeerError) else None
        ending = Ending(type(error).__name__, culprit, str(error), time.monotonic() - began)
    report_and_stay(fabric, folder)
    return ending


def assert_paths(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    """Equal to rounding."""
    torch.testing.assert_close(torch.stack(actual), torch.stack(expected), rtol=tolerance, atol=tolerance)
