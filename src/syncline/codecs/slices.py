"""One-shot exchange: every rank owns a slice, hears it from all, adds in fp32, and tells the result to all.

Whatever the number of ranks, a value is coded twice: by its sender, and by the owner of its slice. What the owner's
coding loses is lost for all, so with error feedback the owner keeps it W times: it comes back W times in the sum that
is then divided by W.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from syncline.codecs.codec import Place
from syncline.codecs.conversation import Conversation, Exchange, Gather
from syncline.codecs.kernels import How

Encode = Callable[[Tensor, int], Tensor]  # values, and a number that differs for every use in a step
Decode = Callable[[Tensor, Tensor, How], None]  # a message, where its values belong, and what to do there


def exchange_slices(values: Tensor, place: Place, block: int, encode: Encode, decode: Decode) -> Conversation:
    """Talk about `values`; slices are cut at multiples of a block."""
    bounds = slice_bounds(values.numel(), place.world, block)
    pieces = [values[lo:hi] for lo, hi in itertools.pairwise(bounds)]
    parts = [encode(piece, owner) for owner, piece in enumerate(pieces)]
    for piece, part in zip(pieces, parts, strict=True):
        decode(part, piece, "subtract")
    heard = yield Exchange(parts)
    own = pieces[place.rank]
    total = torch.empty_like(own)
    for number, message in enumerate(heard):
        decode(message, total, "add" if number else "write")
    total /= place.world
    result = encode(total, place.world)
    decode(result, total, "subtract")
    own.add_(total, alpha=place.world)
    results = yield Gather(result)

    def write(out: Tensor) -> None:
        for rank, message in enumerate(results):
            decode(message, out[bounds[rank] : bounds[rank + 1]], "write")

    return write


def slice_bounds(numel: int, world: int, block: int) -> list[int]:
    """W slices of whole blocks, equal but for the last ones."""
    blocks = -(-numel // block)
    each = -(-blocks // world)
    return [min(rank * each * block, numel) for rank in range(world + 1)]
