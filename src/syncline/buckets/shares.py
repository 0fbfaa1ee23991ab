"""Gradients on their way into a bucket, divided by the number of ranks where an engine only adds.

One pass copies, divides and sees whether all is finite, so that nothing is left to do when the sum has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from syncline.fabric.base import DTYPES

try:
    from syncline import _native as found
except ImportError:
    native: ModuleType | None = None
else:
    native = found


@torch.no_grad()
def put(gradients: Sequence[Tensor], views: Sequence[Tensor], divisor: int) -> bool | None:
    """Write what gradients, of one dtype, count in a mean; whether all is finite, where that comes out on the way."""
    if native is not None and all(map(have_one_layout, gradients, views)):
        moves = [(view.data_ptr(), one.data_ptr(), one.numel()) for one, view in zip(gradients, views, strict=True)]
        finite: bool = native.divide(moves, DTYPES.index(views[0].dtype), divisor)
        return finite
    put_plainly(gradients, views, divisor)
    return None


def put_plainly(gradients: Sequence[Tensor], views: Sequence[Tensor], divisor: int) -> None:
    """The twin of the native way, for any device and layout."""
    for gradient, view in zip(gradients, views, strict=True):
        torch.div(gradient.to_dense() if gradient.is_sparse else gradient, divisor, out=view)


def have_one_layout(gradient: Tensor, view: Tensor) -> bool:
    """Whether one is the other in memory; a view has no gaps."""
    return (
        gradient.device.type == "cpu"
        and gradient.layout == torch.strided
        and gradient.dtype == view.dtype
        and gradient.stride() == view.stride()
    )
