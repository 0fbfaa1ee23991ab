"""One bit an element: the sign, with the mean magnitude of its block. Wire: 1/8 byte an element, and 2 bytes a block.

    message    scales of bfloat16, one a block | signs, eight in a byte, 1 for zero and above

Blocks are short: scales of 32 bits would be half of what is said. What rounding them takes away is kept with the rest.

As a vote (`onebit:vote=true`) scales are left out, and the result is +1 or -1 by the majority of ranks, ties up:
signSGD, which learns from signs alone and needs no feedback, and a learning rate of its own. Every rank has one vote
for each entry, and a zero votes up, as a bit cannot abstain.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs import kernels
from syncline.codecs.codec import Codec, Cut, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration, Exchange, Gather
from syncline.codecs.kernels.reference import expect_length, pack_bits, packed_bytes, scaled_bytes, unpack_bits
from syncline.codecs.slices import declare_slices, exchange_slices, slice_bounds
from syncline.core.parts import Part, numel_of
from syncline.errors import ConfigError, PairingError


@dataclass(frozen=True, kw_only=True)
class OneBit(Codec):
    """Signs and block scales."""

    name: ClassVar[str] = "onebit"
    block: int = 16  # values that share a scale; more says less, and suffers more from values that are almost zero
    vote: bool = False  # signSGD with majority vote
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ConfigError(f"block={self.block} is not a multiple of 8; try block={max(8, self.block // 8 * 8)}")
        if self.vote and self.feedback:
            raise PairingError("a vote has no size that could be fed back; write onebit:vote=true,feedback=false")
        if not self.vote and not self.feedback:
            raise PairingError("signs without feedback do not converge; use feedback=true, or vote=true,feedback=false")

    @property
    def cut(self) -> Cut:
        return Cut("block", self.block)

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        length = packed_bytes if self.vote else self.length
        return declare_slices(numel_of(parts), world, self.block, length)

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """An exchange and a gather."""
        if self.vote:
            return (yield from self.count_votes(values, context))
        return (yield from exchange_slices(values, context, self.block, self.take, self.decode, self.length))

    def length(self, numel: int) -> int:
        """Of a message, in bytes."""
        return scaled_bytes(numel, self.block, bits=1)

    def take(self, values: Tensor, _: int) -> Tensor:
        """Values to a message, which leaves what it does not say."""
        return kernels.take_signs(values, self.block)

    def decode(self, message: Tensor, out: Tensor, how: kernels.How = "write") -> None:
        """A message to values."""
        kernels.unpack_signs(message, out, self.block, how)

    def count_votes(self, values: Tensor, context: ReduceContext) -> Conversation:
        """Signs to the owners of slices, the sign of their sum to all."""
        bounds = slice_bounds(values.numel(), context.world, self.block)
        pieces = [values[lo:hi] for lo, hi in itertools.pairwise(bounds)]
        heard = yield Exchange([pack_bits(piece >= 0) for piece in pieces])
        ayes = torch.stack([votes_of(message, pieces[context.rank].numel()) for message in heard]).sum(0)
        _, to_gather = declare_slices(values.numel(), context.world, self.block, packed_bytes)
        results = yield Gather(pack_bits(2 * ayes >= len(heard)), to_gather.sizes)

        def write(out: Tensor) -> None:
            for message, (lo, hi) in zip(results, itertools.pairwise(bounds), strict=True):
                out[lo:hi] = 2.0 * votes_of(message, hi - lo) - 1.0

        return write


def votes_of(message: Tensor, numel: int) -> Tensor:
    """Whether a rank is for each entry to go up."""
    expect_length(message, packed_bytes(numel), "votes")
    return unpack_bits(message, numel)
