"""PowerSGD: a gradient matrix as the product of two thin ones. Wire: (rows + columns) * rank * 4 bytes a matrix.

    P = M Q, averaged and made orthonormal; Q = M' P, averaged; the mean is about P Q'.

Both thin matrices are held by columns. The last Q, made orthonormal, is where the next step starts, so that over steps
it follows the directions that matter; where a gradient had too few of them, others are drawn. What is kept is this
rank's own matrix less its own product, not the averaged one, which keeps it bounded. Vectors and matrices that would
hardly get smaller go as they are. (Vogels, Karimireddy, Jaggi 2019)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs import low_rank
from syncline.codecs.codec import Codec, Cut, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration, Mean
from syncline.codecs.low_rank import Matrix, Shape, left_shapes, right_shapes
from syncline.core.parts import Part, numel_of
from syncline.errors import ConfigError


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Low-rank factors."""

    name: ClassVar[str] = "powersgd"
    feedback: ClassVar[bool] = True  # type: ignore[misc]
    tolerance: ClassVar[float] = 1e-4  # type: ignore[misc]  # torch does not say in which order `mm` adds
    rank: int = 4  # of the factors; larger is more exact
    min_compression_rate: float = 2.0  # matrices that would shrink by less go as they are

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank={self.rank} is less than 1; try powersgd:4")
        if not self.min_compression_rate >= 1:
            raise ConfigError(
                f"min_compression_rate={self.min_compression_rate} is not 1 or more, so factors larger than their "
                f"matrix would be sent; try min_compression_rate=2"
            )

    def start(self, parts: Sequence[Part], device: torch.device) -> State:
        """Random factors, the same on all ranks."""
        state = {}
        for part in filter(self.shrinks, parts):
            matrix = self.matrix(part)
            like = torch.empty(matrix.factors, matrix.columns, dtype=torch.float32, device=device)
            state[key_of(part)] = drawn(like, part, ReduceContext(0, 1, 0, 0, (part,)))
        return state

    def matrix(self, part: Part) -> Matrix:
        """The first dimension, and all others."""
        rows = part.shape[0] if part.shape else 1
        columns = (part.hi - part.lo) // max(rows, 1)
        return Matrix(part.lo, rows, columns, min(self.rank, rows, columns))

    def shrinks(self, part: Part) -> bool:
        """Whether factors are smaller than the matrix by enough."""
        _, rows, columns, factors = self.matrix(part)
        return len(part.shape) > 1 and (rows + columns) * factors * self.min_compression_rate < rows * columns

    @property
    def cut(self) -> Cut:
        return Cut("matrix")

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        matrices = [self.matrix(part) for part in parts if self.shrinks(part)]
        dense = numel_of([part for part in parts if not self.shrinks(part)])
        lefts, rights = low_rank.numel_of(left_shapes(matrices)), low_rank.numel_of(right_shapes(matrices))
        return Declaration("mean", (4 * (dense + lefts),), 4), Declaration("mean", (4 * rights,), 4)

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """Two means: of all left factors with what goes as it is, and of all right factors."""
        thin = [part for part in context.parts if self.shrinks(part)]
        matrices = [self.matrix(part) for part in thin]
        others = [part for part in context.parts if not self.shrinks(part)]
        dense = [values[part.lo : part.hi] for part in others]
        starts = torch.cat([values.new_empty(0), *(state[key_of(part)].view(-1) for part in thin)])
        lefts = low_rank.times_rights(values, matrices, starts)
        told = yield Mean(torch.cat([*dense, lefts]))
        *plain, bases = (piece.clone() for piece in torch.split(told, [*map(len, dense), len(lefts)]))
        low_rank.orthonormalize(bases, left_shapes(matrices))
        rights = low_rank.take_rights(values, matrices, bases)
        for piece in dense:
            piece.zero_()
        factors = (yield Mean(rights)).clone()
        state.update(next_starts(factors, thin, right_shapes(matrices), context))

        def write(out: Tensor) -> None:
            for part, mean in zip(others, plain, strict=True):
                out[part.lo : part.hi] = mean
            low_rank.write_products(out, matrices, bases, factors)

        return write


def key_of(part: Part) -> str:
    """Of where the next step starts."""
    return f"{part.name}/factor"


def drawn(like: Tensor, part: Part, context: ReduceContext) -> Tensor:
    """A random factor, the same on all ranks."""
    generator = replace(context, parts=(part,)).generator(torch.device("cpu"), "powersgd")
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def next_starts(factors: Tensor, parts: Sequence[Part], shapes: Sequence[Shape], context: ReduceContext) -> State:
    """The directions of averaged factors; what is nothing would stay nothing, so it is drawn anew."""
    directions = factors.clone()
    are_something = low_rank.orthonormalize(directions, shapes)
    starts = [start.clone() for start in low_rank.pieces(directions, shapes)]
    if not are_something:
        starts = [with_drawn(start, part, context) for start, part in zip(starts, parts, strict=True)]
    return {key_of(part): start for part, start in zip(parts, starts, strict=True)}


def with_drawn(start: Tensor, part: Part, context: ReduceContext) -> Tensor:
    """With random rows where there is nothing."""
    return torch.where(start.any(dim=1, keepdim=True), start, drawn(start, part, context))
