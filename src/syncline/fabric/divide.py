"""The division of a mean, after an engine has made the sum: in one pass that also sees whether all is finite."""

from __future__ import annotations

from torch import Tensor

from syncline.core.native import native
from syncline.fabric.calls import DTYPES


def divide(total: Tensor, world: int) -> bool | None:
    """Divide a sum in place, integers towards zero; whether all of it is finite, where that comes out on the way."""
    if native is None or total.device.type != "cpu":
        divide_plainly(total, world)
        return None
    finite: bool = native.divide(
        [(total.data_ptr(), total.data_ptr(), total.numel())], DTYPES.index(total.dtype), world
    )
    return finite


def divide_plainly(total: Tensor, world: int) -> None:
    """The twin of the native division."""
    total.div_(world, rounding_mode=None if total.is_floating_point() else "trunc")
