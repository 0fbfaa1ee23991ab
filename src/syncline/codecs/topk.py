"""The largest entries by magnitude. Wire: for each entry kept its value and 5 to 16 bits for its position. What is not
sent is kept and sent later.

`select="exact"` takes exactly the largest; `"sampled"` takes those above a threshold that a random sample suggests,
which is faster on devices where sorting is slow, and within 0.7 and 1.3 of the number wanted: more are thinned by
size, never by position. With a `block` the same fraction is taken from every block of neighbours, so that no layer of
a bucket is left out for long because another has larger gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs import kernels
from syncline.codecs.codec import Codec, Cut, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration, Gather
from syncline.codecs.entries import FORMS, declare_entries
from syncline.core.parts import Part, numel_of
from syncline.errors import ConfigError, UnknownName

SELECTIONS = ("exact", "sampled")
LEAST_SAMPLE = 4096
MOST_TRIES = 10


@dataclass(frozen=True)
class TopK(Codec):
    """A fraction of entries, the largest ones."""

    name: ClassVar[str] = "topk"
    says_all: ClassVar[bool] = False
    feedback: ClassVar[bool] = True  # type: ignore[misc]
    keep: float = 0.01  # fraction of entries sent; smaller compresses more
    values: str = "fp32"  # or "fp16", "int8"; what rounding takes away is kept
    select: str = "exact"  # or "sampled"
    block: int = 0  # neighbours from which a selection is made; 0 is the whole bucket

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep={self.keep} is not a fraction above 0 and up to 1; try topk:0.01")
        if self.values not in FORMS:
            raise UnknownName("values", self.values, FORMS)
        if self.select not in SELECTIONS:
            raise UnknownName("select", self.select, SELECTIONS)
        if self.block and self.block * self.keep < 1:
            raise ConfigError(
                f"block={self.block} has less than one entry to send at keep={self.keep}; "
                f"try block={math.ceil(1 / self.keep)}, or 0 for the whole bucket"
            )

    @property
    def cut(self) -> Cut:
        return Cut("block", self.block) if self.block else Cut("element")

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        numel = numel_of(parts)
        return (declare_entries(self.most(numel), numel, self.values, world),)

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """One gather."""
        message = kernels.take_entries(values, self.choose(values, context), self.values)
        (to_gather,) = self.questions(context.parts, context.world, context.step)
        messages = yield Gather(message, to_gather.sizes, has_entries=True)
        return lambda out: kernels.mean_of_entries(out, messages, self.values)

    def count(self, numel: int) -> int:
        """How many entries of so many."""
        return min(numel, max(1, round(self.keep * numel)))

    def most(self, numel: int) -> int:
        """How many entries of so many are sent at most: with an exact selection, as many as always."""
        block = self.block or max(numel, 1)
        whole, rest = divmod(numel, block)
        return whole * self.most_of_row(block) + (self.most_of_row(rest) if rest else 0)

    def most_of_row(self, columns: int) -> int:
        """How many entries of a row are sent at most."""
        wanted = self.count(columns)
        if self.select == "exact" or wanted == columns or columns <= LEAST_SAMPLE:
            return wanted
        return min(columns, math.floor(1.3 * wanted) + 1)

    def choose(self, values: Tensor, context: ReduceContext) -> Tensor:
        """Positions, ascending."""
        block = self.block or max(values.numel(), 1)
        whole = values.numel() // block * block
        chosen = self.choose_from(values[:whole].view(-1, block), context)
        if whole == values.numel():
            return chosen
        return torch.cat([chosen, whole + self.choose_from(values[whole:].view(1, -1), context)])

    def choose_from(self, rows: Tensor, context: ReduceContext) -> Tensor:
        """The same number of entries from every row; where a sample would be no smaller than a row, the largest."""
        wanted = self.count(rows.shape[1])
        if self.select == "exact" or wanted == rows.shape[1] or rows.shape[1] <= LEAST_SAMPLE or not len(rows):
            return kernels.select_largest(rows, wanted)
        return select_sampled(rows, wanted, context.generator(rows.device, context.rank, "sample"))


def select_sampled(values: Tensor, wanted: int, generator: torch.Generator) -> Tensor:
    """Positions above a threshold that a sample suggests: about as many as wanted, of every row."""
    sizes = values.abs().view(-1, values.shape[-1])
    columns = sizes.shape[1]
    drawn = torch.randint(columns, (max(LEAST_SAMPLE, columns // 256),), generator=generator, device=values.device)
    rank = max(1, round(wanted / columns * len(drawn)))
    thresholds = sizes[:, drawn].topk(rank, dim=1).values[:, -1:]
    for _ in range(MOST_TRIES):
        found = sizes > thresholds
        counts = found.sum(1, keepdim=True)
        if bool((counts >= 0.7 * wanted).all()):
            break
        thresholds = torch.where(counts < 0.7 * wanted, 0.7 * thresholds, thresholds)
    missed = ((counts < 0.7 * wanted) | (counts > 1.3 * wanted)).view(-1).nonzero().view(-1)
    if len(missed):
        exact = torch.zeros_like(found[missed])
        exact.view(-1)[kernels.select_largest(sizes[missed], wanted)] = True
        found[missed] = exact
    return found.view(-1).nonzero().view(-1)
