"""Integers of 8 or 4 bits with a scale for every block. Wire: 1 or 1/2 byte an element, and 4 bytes a block.

    message    scales of float32, one a block | integers, two in a byte for int4

The largest value of a block becomes 127 (or 7). With stochastic rounding a value goes up or down at random so that
it is right on average; every rank draws differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs import kernels
from syncline.codecs.codec import Codec, Cut, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration
from syncline.codecs.kernels.reference import scaled_bytes
from syncline.codecs.slices import declare_slices, exchange_slices
from syncline.core.parts import Part, numel_of
from syncline.errors import ConfigError, UnknownName

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """8 bits."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    block: int = 256  # values that share a scale; smaller is more exact and has more scales
    rounding: str = "nearest"  # or "stochastic"
    feedback: bool = True  # keep what rounding took away

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ConfigError(f"block={self.block} is not a multiple of 8; try block={max(8, self.block // 8 * 8)}")
        if self.rounding not in ROUNDINGS:
            raise UnknownName("rounding", self.rounding, ROUNDINGS)

    @property
    def cut(self) -> Cut:
        return Cut("block", self.block)

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        return declare_slices(numel_of(parts), world, self.block, self.length)

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """An exchange and a gather."""
        take = partial(self.take, context=context)
        return (yield from exchange_slices(values, context, self.block, take, self.decode, self.length))

    def length(self, numel: int) -> int:
        """Of a message, in bytes."""
        return scaled_bytes(numel, self.block, self.bits)

    def take(self, values: Tensor, use: int, context: ReduceContext) -> Tensor:
        """Values to a message, which leaves what it does not say."""
        noise = None
        if self.rounding == "stochastic":
            generator = context.generator(values.device, context.rank, use)
            noise = torch.rand(values.numel(), generator=generator, dtype=torch.float32, device=values.device)
        return kernels.take_quantized(values, self.block, self.bits, noise)

    def decode(self, message: Tensor, out: Tensor, how: kernels.How = "write") -> None:
        """A message to values."""
        kernels.dequantize(message, out, self.block, self.bits, how)


@dataclass(frozen=True, kw_only=True)
class Int4(Int8):
    """4 bits."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    block: int = 64
