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

from syncline.codecs import kernels
from syncline.codecs.codec import Codec, Part, Place, State
from syncline.codecs.conversation import Conversation, Mean
from syncline.errors import ConfigError


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Low-rank factors."""

    name: ClassVar[str] = "powersgd"
    feedback: ClassVar[bool] = True  # type: ignore[misc]
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
            rows, columns = matrix_shape(part)
            like = torch.empty(min(self.rank, rows, columns), columns, device=device)
            state[f"{part.name}/factor"] = drawn(like, part, Place(0, 1, 0, 0, (part,)))
        return state

    def shrinks(self, part: Part) -> bool:
        """Whether factors are smaller than the matrix by enough."""
        rows, columns = matrix_shape(part)
        rank = min(self.rank, rows, columns)
        return len(part.shape) > 1 and (rows + columns) * rank * self.min_compression_rate < rows * columns

    def reduce(self, values: Tensor, state: State, place: Place) -> Conversation:
        """Two means: of all left factors with what goes as it is, and of all right factors."""
        matrices = [part for part in place.parts if self.shrinks(part)]
        others = [part for part in place.parts if not self.shrinks(part)]
        views = [values[part.lo : part.hi].view(matrix_shape(part)) for part in matrices]
        starts = [state[f"{part.name}/factor"] for part in matrices]
        lefts = [kernels.times_right(view, start) for view, start in zip(views, starts, strict=True)]
        dense = [values[part.lo : part.hi] for part in others]
        told = yield Mean(together([*dense, *lefts], values))
        averaged = apart(told, [*dense, *lefts])
        plain, bases = averaged[: len(dense)], [kernels.orthonormal(left) for left in averaged[len(dense) :]]
        rights = [take_right(view, basis) for view, basis in zip(views, bases, strict=True)]
        for piece in dense:
            piece.zero_()
        told = yield Mean(together(rights, values))
        factors = apart(told, rights)
        for part, factor in zip(matrices, factors, strict=True):
            state[f"{part.name}/factor"] = next_start(factor, part, place)

        def write(out: Tensor) -> None:
            for part, mean in zip(others, plain, strict=True):
                out[part.lo : part.hi] = mean
            for part, basis, factor in zip(matrices, bases, factors, strict=True):
                kernels.write_product(out[part.lo : part.hi].view(matrix_shape(part)), basis, factor)

        return write


def take_right(matrix: Tensor, basis: Tensor) -> Tensor:
    """The right factor to a left one; what both say is taken from the matrix while that is still in the cache."""
    right = kernels.times_left(matrix, basis)
    kernels.subtract_product(matrix, basis, right)
    return right


def matrix_shape(part: Part) -> tuple[int, int]:
    """The first dimension, and all others."""
    rows = part.shape[0] if part.shape else 1
    return rows, (part.hi - part.lo) // max(rows, 1)


def drawn(like: Tensor, part: Part, place: Place) -> Tensor:
    """A random factor, the same on all ranks."""
    generator = replace(place, parts=(part,)).generator(torch.device("cpu"), "powersgd")
    return torch.randn(like.shape, generator=generator).to(like.device)


def next_start(factor: Tensor, part: Part, place: Place) -> Tensor:
    """The directions of an averaged factor; what is nothing would stay nothing, so it is drawn anew."""
    start = kernels.orthonormal(factor)
    is_something = start.any(dim=1)
    if bool(is_something.all()):
        return start
    return torch.where(is_something.unsqueeze(1), start, drawn(start, part, place))


def together(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """In one flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_zeros(0)


def apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Copies in the shapes that were put together."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape).clone() for piece, tensor in zip(pieces, like, strict=True)]
