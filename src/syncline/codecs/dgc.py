"""Deep gradient compression: top-k of momentum. Wire: that of top-k.

The momentum is kept on each rank, before the selection (correction); an entry that was sent loses its momentum
(masking, if asked for); a gradient is clipped before it is added; and sparsity grows over the first steps (warm-up).
The optimizer on top must be plain SGD without momentum. With ratio 1 and masking off it is momentum SGD. Masking is
for long trainings at 0.001: entries that are sent often have no momentum with it. What is kept has the size of
gradients of the loss itself, so that its scale may change between steps. (Lin and others 2017)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs import kernels
from syncline.codecs.codec import Codec, Part, Place, State
from syncline.codecs.conversation import Conversation, Gather
from syncline.codecs.entries import FORMS
from syncline.codecs.topk import TopK
from syncline.errors import ConfigError, UnknownName


@dataclass(frozen=True)
class DGC(Codec):
    """Top-k with momentum correction."""

    name: ClassVar[str] = "dgc"
    says_all: ClassVar[bool] = False
    feedback: ClassVar[bool] = False  # type: ignore[misc]
    keep: float = 0.01  # fraction of entries sent once warm; smaller compresses more and needs longer training
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = False  # an entry that was sent starts again without momentum, so those sent often have none
    clip: float = 0.0  # of the norm of a bucket's mean gradient; each rank clips at this over the root of W; 0 is never
    warmup: int = 100  # steps over which the fraction falls from 1/4 to what was asked for
    values: str = "fp32"

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep={self.keep} is not a fraction above 0 and up to 1; try dgc:0.001")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum} is not in [0, 1); try momentum=0.9")
        if not self.clip >= 0:
            raise ConfigError(f"clip={self.clip} is not a norm; try clip=1.0, or 0 to clip never")
        if self.warmup < 0:
            raise ConfigError(f"warmup={self.warmup} is less than 0; try warmup=100, or 0 for none")
        if self.values not in FORMS:
            raise UnknownName("values", self.values, FORMS)

    def start(self, parts: Sequence[Part], device: torch.device) -> State:
        """Momentum and what has not been sent, by parameter."""
        kinds = ("momentum", "unsent")
        return {
            f"{part.name}/{kind}": torch.zeros(part.hi - part.lo, device=device) for part in parts for kind in kinds
        }

    def fraction(self, step: int) -> float:
        """How much is sent in a step."""
        if step >= self.warmup or self.keep >= 0.25:
            return self.keep
        return float(0.25 * (self.keep / 0.25) ** (step / self.warmup))

    def reduce(self, values: Tensor, state: State, place: Place) -> Conversation:
        """One gather."""
        momentum = gathered(state, place, "momentum", values).mul_(place.loss_scale)
        unsent = gathered(state, place, "unsent", values).mul_(place.loss_scale)
        if self.clip:
            limit = self.clip * place.loss_scale / place.world**0.5
            values.mul_((limit / values.norm().clamp(min=1e-12)).clamp(max=1.0))
        if self.nesterov:
            momentum = (momentum + values) * self.momentum
            unsent = unsent + momentum + values
        else:
            momentum = momentum * self.momentum + values
            unsent = unsent + momentum
        values.zero_()
        chosen = TopK(self.fraction(place.step)).choose(unsent, place)
        message = kernels.take_entries(unsent, chosen, self.values)
        if self.masking:
            momentum[chosen] = 0
        messages = yield Gather(message, has_entries=True)
        for part in place.parts:
            state[f"{part.name}/momentum"] = momentum[part.lo : part.hi] / place.loss_scale
            state[f"{part.name}/unsent"] = unsent[part.lo : part.hi] / place.loss_scale
        return lambda out: kernels.mean_of_entries(out, messages, self.values)


def gathered(state: State, place: Place, kind: str, like: Tensor) -> Tensor:
    """One kind of state for all parameters of a bucket, which may be none."""
    return torch.cat([like.new_zeros(0), *(state[f"{part.name}/{kind}"] for part in place.parts)])
