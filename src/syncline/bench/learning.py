"""One training of one task with one codec, on one rank.

All train with SGD and momentum, the same learning rates and the same schedule: up over the first tenth, then down to a
tenth. A codec with a momentum of its own (dgc) has plain SGD on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import ClassVar

import torch
from torch import Tensor, nn

from syncline.bench.contenders import attach_sync
from syncline.bench.tasks import Score, task_of
from syncline.bench.trainer import Trainer, Workload
from syncline.bench.workloads import sgd
from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration
from syncline.codecs.correction import Correction
from syncline.codecs.registry import codec_of
from syncline.core.parts import Part
from syncline.errors import NonFiniteGradient
from syncline.fabric.base import Fabric
from syncline.guards.divergence import digest_of

MOMENTUM = 0.9
SMALLEST_RATE = 0.1  # at the end, of the learning rate
CURVE_POINTS = 50


@dataclass(frozen=True)
class Metered(Codec):
    """A codec, and the bytes that a rank sends for it."""

    name: ClassVar[str] = "metered"
    inner: Codec
    sent: list[float] = field(default_factory=list, repr=False, compare=False)  # of every conversation

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        """As the one inside has it."""
        return self.inner.feedback

    @property
    def correction(self) -> Correction | None:
        """That of the one inside."""
        return self.inner.correction

    def phase(self, step: int) -> int:
        return self.inner.phase(step)

    @property
    def most_questions(self) -> int:
        return self.inner.most_questions

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        return self.inner.questions(parts, world, step)

    def start(self, parts: Sequence[Part], device: torch.device) -> State:
        """That of the one inside."""
        return self.inner.start(parts, device)

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """The same conversation."""
        questions = self.questions(context.parts, context.world, context.step)
        self.sent.append(sum(question.wire_bytes(context.world) for question in questions))
        return self.inner.reduce(values, state, context)


@dataclass(frozen=True)
class Trained:
    """One training."""

    score: Score
    curve: list[float]  # the mean loss over ranks, of every few steps
    sent_bytes: float  # by a rank in a step, the mean of all
    end_sent_bytes: float  # the same in the last tenth, when codecs are warm
    digests: list[int]  # of the weights


def train(
    fabric: Fabric, start: nn.Module, task_name: str, codec: str, seed: int, steps: int, rate: float | None = None
) -> Trained:
    """What one rank does, with a copy of the model as it starts."""
    task, metered = task_of(task_name), Metered(codec_of(codec))
    optimizer = partial(sgd, rate=rate or task.learning_rate, momentum=momentum_for(metered.inner))
    workload = Workload(task.title, partial(deepcopy, start), optimizer, task.losses(seed))
    trainer = Trainer(workload, partial(attach_sync, codec=metered, seed=seed, nonfinite="raise"), fabric)
    schedule = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, partial(rate_at, steps=steps))
    losses, sent = [], []
    with suppress(NonFiniteGradient):  # which all ranks raise in the same step
        for _ in range(steps):
            losses.append(float(trainer.step()))
            schedule.step()
            sent.append(sum(metered.sent))
            metered.sent.clear()
    trainer.close()
    model = trainer.model
    losses += [math.nan] * (steps - len(losses))
    curve = fabric.all_reduce(torch.tensor(thinned(losses)), op="mean").tolist()
    with torch.no_grad():
        score = task.score(model) if len(sent) == steps else Score(math.nan)
    return Trained(
        score, curve, mean(sent), mean(sent[-max(1, steps // 10) :]), [digest_of(p) for p in model.parameters()]
    )


def momentum_for(codec: Codec) -> float:
    """Of the optimizer: none if the codec has its own."""
    return MOMENTUM if codec.correction is None else 0.0


def rate_at(step: int, steps: int) -> float:
    """Up over the first tenth, then down as a cosine does."""
    rising = max(1, steps // 10)
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return SMALLEST_RATE + (1 - SMALLEST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def thinned(losses: Sequence[float]) -> list[float]:
    """Means of neighbours, about fifty of them."""
    width = max(1, len(losses) // CURVE_POINTS)
    return [mean(losses[at : at + width]) for at in range(0, len(losses) - width + 1, width)]
