"""Matrices in a flat tensor of values, and their thin factors in flat tensors of their own, one after the other.

    values    ... | a matrix, row by row | ... | another | ...
    lefts     factors x rows of the first | of the second | ...
    rights    factors x columns of the first | of the second | ...

All matrices of a bucket are dealt with in one call, because a bucket may have a hundred of them.

The native kernels add in one order on every processor; torch does not say in which order `mm` does. So products of the
two differ, by at most 2 n 2^-24 of the sum of the magnitudes of their n terms, plus n times the smallest number: twice
what rounding can do in any order. What is taken away from a matrix with such factors differs accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.codecs import kernels

Shape = tuple[int, int]


class Matrix(NamedTuple):
    """One of them."""

    at: int  # where it begins in the values
    rows: int
    columns: int
    factors: int

    def of(self, values: Tensor) -> Tensor:
        """Itself."""
        return values[self.at : self.at + self.rows * self.columns].view(self.rows, self.columns)


def left_shapes(matrices: Sequence[Matrix]) -> list[Shape]:
    """Of their left factors, by columns."""
    return [(matrix.factors, matrix.rows) for matrix in matrices]


def right_shapes(matrices: Sequence[Matrix]) -> list[Shape]:
    """Of their right factors, by columns."""
    return [(matrix.factors, matrix.columns) for matrix in matrices]


def numel_of(shapes: Sequence[Shape]) -> int:
    """Of all of them."""
    return sum(count * length for count, length in shapes)


def pieces(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Views of the factors that lie in a flat tensor."""
    split = torch.split(flat, [count * length for count, length in shapes])
    return [piece.view(shape) for piece, shape in zip(split, shapes, strict=True)]


def times_rights(values: Tensor, matrices: Sequence[Matrix], rights: Tensor) -> Tensor:
    """Left factors: every matrix times its right ones."""
    lefts = values.new_empty(numel_of(left_shapes(matrices)))
    if kernels.native is not None and is_native(values, rights):
        kernels.native.times_rights(lefts.data_ptr(), values.data_ptr(), matrices, rights.data_ptr())
        return lefts
    for matrix, left, right in each(matrices, lefts, rights):
        torch.mm(right, matrix.of(values).T, out=left)
    return lefts


def take_rights(values: Tensor, matrices: Sequence[Matrix], lefts: Tensor) -> Tensor:
    """Right factors: every transposed matrix times its left ones. What both say is taken away from the matrix."""
    rights = values.new_empty(numel_of(right_shapes(matrices)))
    if kernels.native is not None and is_native(values, lefts):
        kernels.native.take_rights(rights.data_ptr(), values.data_ptr(), matrices, lefts.data_ptr())
        return rights
    for matrix, left, right in each(matrices, lefts, rights):
        torch.mm(left, matrix.of(values), out=right)
        matrix.of(values).sub_(left.T @ right)
    return rights


def write_products(out: Tensor, matrices: Sequence[Matrix], lefts: Tensor, rights: Tensor) -> None:
    """Every matrix becomes the product of its factors."""
    if kernels.native is not None and is_native(out, lefts, rights):
        kernels.native.write_products(out.data_ptr(), matrices, lefts.data_ptr(), rights.data_ptr())
        return
    for matrix, left, right in each(matrices, lefts, rights):
        torch.mm(left.T, right, out=matrix.of(out))


def orthonormalize(flat: Tensor, shapes: Sequence[Shape]) -> bool:
    """Every factor gets orthonormal rows of the same span; what adds nothing to it becomes zeros. Whether none did."""
    if kernels.native is not None and is_native(flat):
        return bool(kernels.native.orthonormalize(flat.data_ptr(), shapes))
    are_something = [orthonormalize_rows(rows) for rows in pieces(flat, shapes)]
    return all(are_something)


def orthonormalize_rows(rows: Tensor) -> bool:
    """Gram-Schmidt, twice for exactness, row by row in double precision. Whether none was nothing."""
    done: list[Tensor] = []
    are_something = True
    for row in rows.double().unbind(0):
        rest = row
        for _ in range(2):
            for other in done:
                rest = rest - other * (other @ rest)
        length = rest.norm()
        is_something = bool(length > 1e-6 * row.norm())
        unit = rest / length if is_something else torch.zeros_like(rest)
        done.append(unit.to(rows.dtype).double())
        are_something &= is_something
    rows.copy_(torch.stack(done))
    return are_something


def each(matrices: Sequence[Matrix], lefts: Tensor, rights: Tensor) -> zip[tuple[Matrix, Tensor, Tensor]]:
    """A matrix at a time, with its factors."""
    both = pieces(lefts, left_shapes(matrices)), pieces(rights, right_shapes(matrices))
    return zip(matrices, *both, strict=True)


def is_native(*tensors: Tensor) -> bool:
    """Whether the native kernels can take these."""
    return kernels.runs_natively(*tensors) and all(tensor.dtype == torch.float32 for tensor in tensors)
