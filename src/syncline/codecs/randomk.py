"""Random entries, the same on all ranks, so their mean is an ordinary one. Wire: 4 bytes for each entry kept.

One entry is drawn from every block of 1/keep neighbours, from a counter seed (job, step, parameter): nothing that a
skipped step or a rank that joined later could put out of step. With error feedback entries go as they are; without,
they are scaled by 1/keep and right on average. Scaled with feedback diverges, and neither does not converge: both are
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.codec import Codec, Cut, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration, Mean
from syncline.core.parts import Part, numel_of
from syncline.errors import ConfigError, PairingError

LEAST_KEEP = 1e-9  # no bucket has more entries


@dataclass(frozen=True)
class RandomK(Codec):
    """A random fraction of entries."""

    name: ClassVar[str] = "randomk"
    says_all: ClassVar[bool] = False
    keep: float = 0.01  # fraction of entries sent; smaller compresses more
    scaled: bool = False  # by 1/keep, which is unbiased
    feedback: bool = True

    def __post_init__(self) -> None:
        if not LEAST_KEEP <= self.keep <= 1:
            raise ConfigError(f"keep={self.keep} is not a fraction from {LEAST_KEEP} up to 1; try randomk:0.01")
        if self.scaled and self.feedback:
            raise PairingError(
                f"scaled entries are unbiased, so error feedback would diverge; use randomk:{self.keep}, or "
                f"randomk:{self.keep},scaled=true,feedback=false"
            )
        if not self.scaled and not self.feedback:
            raise PairingError(
                f"entries that are neither scaled nor fed back are biased; use randomk:{self.keep}, or "
                f"randomk:{self.keep},scaled=true,feedback=false"
            )

    @property
    def block(self) -> int:
        """Neighbours of which one is sent."""
        return max(1, round(1 / self.keep))

    @property
    def cut(self) -> Cut:
        return Cut("block", self.block)

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        return (Declaration("mean", (4 * -(-numel_of(parts) // self.block),), 4),)

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """One mean of the entries."""
        starts = torch.arange(0, values.numel(), self.block, device=values.device)
        sizes = (values.numel() - starts).clamp(max=self.block)  # the last block may be short
        chosen = self.indices(starts, sizes, context)
        mean = yield Mean(values[chosen])
        values[chosen] = 0

        def write(out: Tensor) -> None:
            out.zero_()
            out[chosen] = mean * sizes if self.scaled else mean

        return write

    def indices(self, starts: Tensor, sizes: Tensor, context: ReduceContext) -> Tensor:
        """One of every block."""
        device = starts.device
        generator = context.generator(device, "randomk")
        uniform = torch.rand(len(starts), generator=generator, dtype=torch.float32, device=device)
        return starts + (uniform * sizes).long().clamp(max=self.block - 1).minimum(sizes - 1)
