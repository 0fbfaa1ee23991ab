"""The arithmetic of means that an engine leaves to us: it only adds, and not 16-bit values in float32."""

from __future__ import annotations

import torch
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
    """The reference of the native division, which gives the same bits."""
    total.div_(world, rounding_mode=None if total.is_floating_point() else "trunc")


def mean_of_halves(rows: Tensor) -> None:
    """Write the mean of rows of 16-bit values to the first; they are added in float32, in order, and rounded once."""
    if native is None or rows.device.type != "cpu":
        mean_of_halves_plainly(rows)
        return
    starts = [row.data_ptr() for row in rows]
    native.mean(starts[0], starts, rows.shape[1], DTYPES.index(rows.dtype))


def mean_of_halves_plainly(rows: Tensor) -> None:
    """The reference of the native mean, which gives the same bits."""
    total = rows[0].to(torch.float32)
    for row in rows[1:]:
        total += row.to(torch.float32)
    rows[0] = total / len(rows)
