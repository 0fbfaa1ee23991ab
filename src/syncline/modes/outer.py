"""What becomes of the mean of how far ranks have come: it is a gradient to an outer optimizer.

`distance` is where ranks started minus where they are, so that an optimizer that minimises goes where they went.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Outer(Protocol):
    """Moves the common starting point, the anchor."""

    momenta: dict[str, Tensor]  # by parameter

    def step(self, name: str, anchor: Tensor, distance: Tensor, rate: float) -> None:
        """Move the anchor of a parameter; `rate` is the learning rate of its inner optimizer."""


@dataclass
class Follow:
    """Go where the ranks went, which is to average them."""

    momenta: dict[str, Tensor] = field(default_factory=dict)

    def step(self, name: str, anchor: Tensor, distance: Tensor, rate: float) -> None:
        anchor.sub_(distance)


@dataclass
class WithMomentum:
    """An outer optimizer that remembers where it went."""

    lr: float
    momentum: float
    momenta: dict[str, Tensor] = field(default_factory=dict)

    def remember(self, name: str, step: Tensor, weight: float = 1.0) -> Tensor:
        """Add a step to the momentum of a parameter; the momentum."""
        remembered = self.momenta.setdefault(name, torch.zeros_like(step))
        return remembered.mul_(self.momentum).add_(step, alpha=weight)


class Nesterov(WithMomentum):
    """DiLoCo's: SGD with Nesterov momentum in torch's form."""

    def step(self, name: str, anchor: Tensor, distance: Tensor, rate: float) -> None:
        if not self.momentum:
            anchor.sub_(distance, alpha=self.lr)
            return
        remembered = self.remember(name, distance)
        anchor.sub_(distance.add(remembered, alpha=self.momentum), alpha=self.lr)


class SlowMomentum(WithMomentum):
    """SlowMo's: momentum in units of gradients, so that it survives a change of the learning rate."""

    def step(self, name: str, anchor: Tensor, distance: Tensor, rate: float) -> None:
        if not rate:  # nothing can be said about gradients; ranks that moved all the same are followed
            anchor.sub_(distance)
            return
        anchor.sub_(self.remember(name, distance, 1 / rate), alpha=self.lr * rate)
