"""Ranks with different numbers of batches, of which some go astray. Light: ranks import it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import syncline
from support.models import normalized
from support.trainees import ADAM, Trainee
from syncline.errors import NonFiniteGradient

LARGE = torch.finfo(torch.float64).max / 2  # finite, but sums are not


class Joined(NamedTuple):
    """A rank after `join`."""

    place: Tensor
    others: list[Tensor]  # buffers, and what the optimizer keeps
    error: str = ""


@dataclass(frozen=True)
class Straying:
    """Batches of each rank, and the step after which a parameter of some ranks becomes another one."""

    mode: str
    counts: tuple[int, ...]
    strays: Mapping[int, int]  # the step, by rank
    value: float = torch.nan
    codec: str = "none"
    settings: Mapping[str, Any] = field(default_factory=dict)
    joins: int = 1  # in a row, with all of it again

    def __call__(self, fabric: syncline.Fabric) -> list[Joined]:
        """After every `join`, up to an error, and after some more steps of all ranks."""
        trainee = Trainee(fabric, self.mode, ADAM, normalized, codec=self.codec, **self.settings)
        seen = []
        try:
            for _ in range(self.joins):
                with trainee.sync.join():
                    self.train(trainee)
                seen.append(joined(trainee))
            trainee.train(3)
            trainee.sync.drain()
            return [*seen, joined(trainee)]
        except NonFiniteGradient as error:
            return [*seen, joined(trainee)._replace(error=str(error))]

    def train(self, trainee: Trainee) -> None:
        """One rank's batches."""
        for step in range(1, self.counts[trainee.fabric.rank] + 1):
            trainee.optimizer.zero_grad()
            trainee.backward()
            if self.strays.get(trainee.fabric.rank) == step:
                with torch.no_grad():
                    next(trainee.model.parameters())[0] = self.value
            trainee.update()


def joined(trainee: Trainee) -> Joined:
    buffers = [buffer.clone() for buffer in trainee.model.buffers()]
    return Joined(trainee.place(), [*buffers, *trainee.state()])
