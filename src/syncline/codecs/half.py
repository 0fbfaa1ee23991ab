"""16-bit floats on the wire, added in fp32 by the owner of each slice. Wire: 2 bytes an element.

fp16 has ten digits of mantissa and overflows above 65504, bf16 seven and the range of fp32. The mean is rounded once,
after the division, so 8 ranks with 20000 each do not overflow. With feedback the largest number goes instead of an
infinity, and the rest is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs import kernels
from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration, Mean
from syncline.codecs.kernels.reference import expect_length
from syncline.codecs.slices import declare_slices, exchange_slices
from syncline.core.parts import Part, numel_of


@dataclass(frozen=True, kw_only=True)
class Fp16(Codec):
    """Half precision."""

    name: ClassVar[str] = "fp16"
    wire: ClassVar[torch.dtype] = torch.float16
    feedback: bool = False  # keep what rounding took away

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        if self.feedback:
            return declare_slices(numel_of(parts), world, 1, self.length)
        return (Declaration("mean", (2 * numel_of(parts),), 2),)

    @property
    def stays_finite(self) -> bool:
        """Without feedback what is too large becomes infinite."""
        return self.feedback

    @property
    def carries_nonfinite(self) -> bool:
        return not self.feedback

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """One mean; with feedback a one-shot exchange, because what the owner's rounding takes away is kept too."""
        if self.feedback:
            return (yield from exchange_slices(values, context, 1, self.take, self.decode, self.length))
        mean = yield Mean(kernels.narrow(values, self.wire))
        return lambda out: kernels.widen(out, mean)

    def length(self, numel: int) -> int:
        """Of a message, in bytes."""
        return 2 * numel

    def take(self, values: Tensor, _: int) -> Tensor:
        """Values to a message, which leaves what it does not say."""
        message = kernels.narrow(values, self.wire, saturates=True).view(torch.uint8)
        self.decode(message, values, "subtract")
        return message

    def decode(self, message: Tensor, out: Tensor, how: kernels.How = "write") -> None:
        """A message to values."""
        expect_length(message, self.length(out.numel()), "16-bit values")
        values = torch.empty_like(out)
        kernels.widen(values, message.view(self.wire))
        kernels.HOWS[how](out, values)


@dataclass(frozen=True, kw_only=True)
class Bf16(Fp16):
    """Brain floats."""

    name: ClassVar[str] = "bf16"
    wire: ClassVar[torch.dtype] = torch.bfloat16
