"""Error feedback, the same for every codec: the residual is what was not sent, and is added to the next gradient.

It is kept in fp32, by parameter, in the units of a step and not of a gradient: when the learning rate changes it is
scaled so that the step it stands for stays the same, and when the scale of the loss changes it follows the gradients.
So it is where means are over fewer ranks than all: a residual counts as it did in the pass in which it was made. In a
step with a learning rate of 0 no residual is sent, because it would be lost.

What a codec leaves of residual and gradient is written beside the residual; when the pass is known to be good the two
change places, and otherwise nothing has changed.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.codecs import kernels
from syncline.core.parts import Part


@dataclass(frozen=True)
class GradientScale:
    """What a gradient is worth now: the learning rate of each parameter, the scale of the loss, and its share."""

    learning_rates: dict[str, float]
    loss_scale: float = 1.0
    share: float = 1.0  # of a rank in what comes, against that in the mean over all: more where fewer have data

    def step_scale(self, name: str) -> float:
        """How far a step goes for a unit of this parameter's gradient."""
        return self.learning_rates.get(name, 1.0) * self.share / self.loss_scale


class Residual:
    """Residual of the parameters of one bucket."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.parts = parts
        self.values = torch.zeros(parts[-1].hi if parts else 0, dtype=torch.float32, device=device)
        self.step_scale: dict[str, float] = {}  # of a unit of the residual, by parameter
        self.made_at: GradientScale | None = None  # when all of it was made in one pass: the scale of that
        self.spare: Tensor | None = None  # memory for the next residual

    def next_values(self) -> Tensor:
        """Memory for the next residual, until it is committed."""
        if self.spare is None:
            self.spare = torch.empty_like(self.values)
        return self.spare

    def add_to(self, gradient: Tensor, scale: GradientScale, out: Tensor) -> float:
        """Write gradient and residual, as much as that is worth now, to `out`; the largest magnitude of it."""
        if scale == self.made_at:
            return kernels.add_residual(out, gradient, self.values)
        factors = {part.name: self.factor(part.name, scale) for part in self.parts}
        if set(factors.values()) == {1.0}:
            return kernels.add_residual(out, gradient, self.values)
        for name, lo, hi, _ in self.parts:
            torch.add(gradient[lo:hi], self.values[lo:hi], alpha=factors[name], out=out[lo:hi])
        return kernels.add_residual(out, out, None)

    def factor(self, name: str, scale: GradientScale) -> float:
        """By how much the residual of a parameter has to be scaled."""
        now = scale.step_scale(name)
        return self.step_scale.get(name, now) / now if now else 0.0

    def restore(self, name: str, step_scale: float) -> None:
        """Take the residual of a parameter for one of a pass with this scale."""
        self.step_scale[name] = step_scale
        self.made_at = None

    def commit(self, left: Tensor, scale: GradientScale, unused: Container[str] = ()) -> None:
        """Go on with what was left of gradients of this scale; parameters that nobody used keep their residual."""
        if left is self.spare and scale == self.made_at and not unused:
            self.values, self.spare = left, self.values
            return
        renewed = [part for part in self.parts if part.name not in unused and scale.step_scale(part.name)]
        if left is self.spare:
            kept = [part for part in self.parts if part.name in unused or not scale.step_scale(part.name)]
            for part in kept:
                left[part.lo : part.hi] = self.values[part.lo : part.hi]
            self.values, self.spare = left, self.values
        else:
            for part in renewed:
                self.values[part.lo : part.hi] = left[part.lo : part.hi]
        self.step_scale |= {part.name: scale.step_scale(part.name) for part in renewed}
        self.made_at = scale if len(renewed) == len(self.parts) else None
