"""Momentum correction: each rank sends its momentum in place of its gradient, whatever the codec makes of it.

    momentum    u = m * u + g       kept on each rank, by parameter
    sent        u                   and with it what error feedback has kept of earlier ones

The mean of momenta is the momentum of the mean, so what goes as it is comes out as SGD with momentum has it, and what
goes through a codec comes out as the same, later. A momentum has the size of gradients of the loss itself, so that its
scale may change between steps, and counts as much as when it was made, so that the number of ranks with data may. It
does not follow the learning rate, as that of torch.optim.SGD does not. (Lin and others 2017)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.codecs.codec import ReduceContext, State
from syncline.core.parts import Part


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What becomes of a gradient before what was kept is added and a codec has it."""

    momentum: float
    nesterov: bool = False
    masking: bool = False  # the codec takes the momentum from entries that it sends
    clip: float = 0.0  # of the norm of a bucket's mean gradient; each rank clips at this over the root of W; 0 is never

    def start(self, parts: Sequence[Part], device: torch.device) -> State:
        """No momentum yet."""
        return {key_of(part): torch.zeros(part.hi - part.lo, dtype=torch.float32, device=device) for part in parts}

    def apply(self, values: Tensor, state: State, context: ReduceContext) -> State:
        """Put momenta in the place of gradients; returns them, to be kept."""
        if self.clip:
            limit = self.clip * context.loss_scale / context.world**0.5
            values.mul_((limit / values.norm().clamp(min=1e-12)).clamp(max=1.0))
        scale = context.loss_scale / context.share
        momentum = momentum_in(state, context.parts, values).mul_(scale)
        if self.nesterov:
            momentum.add_(values).mul_(self.momentum)
            values.add_(momentum)
        else:
            momentum.mul_(self.momentum).add_(values)
            values.copy_(momentum)
        return momentum_by_part(momentum.div_(scale), context.parts)


def momentum_in(state: State, parts: Sequence[Part], like: Tensor) -> Tensor:
    """A copy of the momentum of these parameters, which may be none, side by side."""
    return torch.cat([like.new_zeros(0), *(state[key_of(part)] for part in parts)])


def momentum_by_part(momentum: Tensor, parts: Sequence[Part]) -> State:
    """What was side by side."""
    return {key_of(part): momentum[part.lo : part.hi] for part in parts}


def key_of(part: Part) -> str:
    """Of a parameter's momentum in the state."""
    return f"{part.name}/momentum"
