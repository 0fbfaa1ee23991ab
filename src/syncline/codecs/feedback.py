"""Error feedback, the same for every codec: what was not sent is kept, and added to the next gradient.

Kept in fp32, by parameter. It is kept in the units of a step, not of a gradient: when the learning rate changes it is
scaled so that the step it stands for stays the same, and when the scale of the loss changes it follows the gradients.
So it is where means are over fewer ranks than all: what was kept counts as it did in the pass in which it was kept.
In a step with a learning rate of 0 nothing that was kept is sent, because it would be lost.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.codecs.codec import Part


@dataclass(frozen=True)
class Units:
    """What a gradient is worth now: the learning rate of each parameter, the scale of the loss, and its share."""

    learning_rates: dict[str, float]
    loss_scale: float = 1.0
    share: float = 1.0  # of a rank in what comes, against that in the mean over all: more where fewer have data


class Feedback:
    """What the parameters of one bucket have kept."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.parts = parts
        self.kept = torch.zeros(parts[-1].hi if parts else 0, device=device)
        self.worth: dict[str, float] = {}  # of a unit of what was kept, by parameter

    def add_to(self, values: Tensor, units: Units) -> None:
        """Add what was kept to a new gradient."""
        factors = {part.name: self.factor(part.name, units) for part in self.parts}
        if set(factors.values()) == {1.0}:
            values.add_(self.kept)
            return
        for part in self.parts:
            values[part.lo : part.hi].add_(self.kept[part.lo : part.hi], alpha=factors[part.name])

    def factor(self, name: str, units: Units) -> float:
        """By how much what was kept of a parameter has to be scaled."""
        now = worth_of(name, units)
        return self.worth.get(name, now) / now if now else 0.0

    def commit(self, left: Tensor, units: Units, unused: Container[str] = ()) -> None:
        """Keep what was not sent, of gradients that were worth this much."""
        for part in self.parts:
            if part.name not in unused and (now := worth_of(part.name, units)):
                self.kept[part.lo : part.hi] = left[part.lo : part.hi]
                self.worth[part.name] = now


def worth_of(name: str, units: Units) -> float:
    """How far a step goes for a unit of this parameter's gradient."""
    return units.learning_rates.get(name, 1.0) * units.share / units.loss_scale
