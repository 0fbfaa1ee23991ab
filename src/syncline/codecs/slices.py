"""One-shot exchange: every rank owns a slice, hears it from all, adds in fp32, and tells the result to all.

Whatever the number of ranks, a value is coded at most twice: by its sender, and in the mean by the owner of its slice.
The owner says nothing to itself, so its own values are in the sum as they are. What its coding of the mean loses is
lost for all, so with error feedback it keeps that W times: it is in the next sum as it is, which is then divided by W.
So both errors come back where they were made, the sender's to what is sent next, and the owner's to the next mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from syncline.codecs.codec import ReduceContext
from syncline.codecs.conversation import Conversation, Declaration, Exchange, Gather
from syncline.codecs.kernels import How

Take = Callable[
    [Tensor, int], Tensor
]  # values, from which what the message says is taken away, and a number for its use
Decode = Callable[[Tensor, Tensor, How], None]  # a message, where its values belong, and what to do there
Length = Callable[[int], int]  # bytes of a message of so many values


def exchange_slices(
    values: Tensor, context: ReduceContext, block: int, take: Take, decode: Decode, length: Length
) -> Conversation:
    """Talk about `values`; slices are cut at multiples of a block."""
    _, to_gather = declare_slices(values.numel(), context.world, block, length)
    bounds = slice_bounds(values.numel(), context.world, block)
    pieces = [values[lo:hi] for lo, hi in itertools.pairwise(bounds)]
    own = pieces[context.rank]
    unsaid = torch.empty(length(own.numel()), dtype=torch.uint8, device=values.device)
    heard = yield Exchange([unsaid if piece is own else take(piece, owner) for owner, piece in enumerate(pieces)])
    for rank, message in enumerate(heard):
        if rank != context.rank:
            decode(message, own, "add")
    own /= context.world
    result = take(own, context.world)
    own *= context.world
    results = yield Gather(result, to_gather.sizes)

    def write(out: Tensor) -> None:
        for rank, message in enumerate(results):
            decode(message, out[bounds[rank] : bounds[rank + 1]], "write")

    return write


def declare_slices(numel: int, world: int, block: int, length: Length) -> tuple[Declaration, Declaration]:
    """The two questions: a message for each owner, and the result of each owner, which are as long."""
    bounds = slice_bounds(numel, world, block)
    sizes = tuple(length(hi - lo) for lo, hi in itertools.pairwise(bounds))
    return Declaration("exchange", sizes), Declaration("gather", sizes)


def slice_bounds(numel: int, world: int, block: int) -> list[int]:
    """W slices of whole blocks, equal but for the last ones."""
    blocks = -(-numel // block)
    each = -(-blocks // world)
    return [min(rank * each * block, numel) for rank in range(world + 1)]
