"""Deep gradient compression: top-k of momentum. Wire: that of top-k.

The momentum is kept on each rank, before the selection (correction); an entry that was sent loses its momentum
(masking, if asked for); a gradient is clipped before it is added; and sparsity grows over the first steps (warm-up).
What is not sent is kept by error feedback. The optimizer on top must be plain SGD without momentum. With ratio 1 and
masking off it is momentum SGD, and so it is alone, and for what `rules` leave as it is. Masking is for long trainings
at 0.001: entries that are sent often have no momentum with it. (Lin and others 2017)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from syncline.codecs import kernels
from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration, Gather
from syncline.codecs.correction import Correction, momentum_by_part, momentum_in
from syncline.codecs.entries import FORMS
from syncline.codecs.topk import TopK
from syncline.core.parts import Part
from syncline.errors import ConfigError, UnknownName


@dataclass(frozen=True)
class DGC(Codec):
    """Top-k with momentum correction."""

    name: ClassVar[str] = "dgc"
    says_all: ClassVar[bool] = False
    feedback: ClassVar[bool] = True  # type: ignore[misc]
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

    @property
    def correction(self) -> Correction:
        """Momentum."""
        return Correction(momentum=self.momentum, nesterov=self.nesterov, masking=self.masking, clip=self.clip)

    def fraction(self, step: int) -> float:
        """How much is sent in a step."""
        if step >= self.warmup or self.keep >= 0.25:
            return self.keep
        return float(0.25 * (self.keep / 0.25) ** (step / self.warmup))

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        return TopK(self.fraction(step), values=self.values).questions(parts, world, step)

    def phase(self, step: int) -> int:
        return min(step, self.warmup)

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """One gather."""
        chosen = TopK(self.fraction(context.step)).choose(values, context)
        message = kernels.take_entries(values, chosen, self.values)
        (to_gather,) = self.questions(context.parts, context.world, context.step)
        messages = yield Gather(message, to_gather.sizes, has_entries=True)
        if self.masking:
            momentum = momentum_in(state, context.parts, values)
            momentum[chosen] = 0
            state |= momentum_by_part(momentum, context.parts)
        return lambda out: kernels.mean_of_entries(out, messages, self.values)
