"""Gradients on their way into a bucket, divided by the number of ranks where an engine only adds.

Large ones are written past the cache: it is a while until they are read, and then by another core. Where they are
divided, one pass copies, divides and sees whether all is finite, so that nothing is left to do when the sum has come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.core.native import native
from syncline.core.torch_internals import copy_each, divide_each, has_no_memory
from syncline.fabric.calls import DTYPES

SMALL_BYTES = 64 << 10  # a gradient up to this size is placed together with others


def put(gradients: Sequence[Tensor], views: Sequence[Tensor], divisor: int) -> bool | None:
    """Write what gradients, of one dtype, count in a mean; whether all is finite, where that comes out on the way."""
    is_small = divisor == 1 and views[0].nbytes <= SMALL_BYTES  # then looking at each takes longer than a plain copy
    if native is None or is_small or not all(map(have_one_layout, gradients, views)):
        put_plainly(gradients, views, divisor)
        return None
    moves = [(view.data_ptr(), one.data_ptr(), one.numel()) for one, view in zip(gradients, views, strict=True)]
    dtype = DTYPES.index(views[0].dtype)
    if divisor == 1:
        native.copy(moves, dtype)
        return None
    finite: bool = native.divide(moves, dtype, divisor)
    return finite


@torch.no_grad()
def put_plainly(gradients: Sequence[Tensor], views: Sequence[Tensor], divisor: int) -> None:
    """The reference kernel, for any device and layout."""
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    copy_each(list(views), dense)
    if divisor != 1:
        divide_each(list(views), divisor)


def have_one_layout(gradient: Tensor, view: Tensor) -> bool:
    """Whether one is the other in memory; a view has no gaps."""
    return (
        gradient.device.type == "cpu"
        and gradient.layout == torch.strided
        and gradient.dtype == view.dtype
        and gradient.shape == view.shape
        and gradient.stride() == view.stride()
        and not gradient.is_neg()  # of which memory has the opposite
        and not has_no_memory(gradient)  # which has no memory
    )
