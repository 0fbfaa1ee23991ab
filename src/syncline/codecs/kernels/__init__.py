"""The kernels of codecs: native ones for float32 in the memory of this machine, reference kernels elsewhere.

Which one runs is decided here, by the device and by what is installed, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from syncline.codecs import entries
from syncline.codecs.kernels import reference
from syncline.codecs.kernels.reference import expect_length, scaled_bytes, scales_bytes
from syncline.core.native import native as native

How = Literal["write", "add", "subtract"]  # what is done with values that are decoded
HOWS: dict[How, Callable[[Tensor, Tensor], Tensor]] = {
    "write": Tensor.copy_,
    "add": Tensor.add_,
    "subtract": Tensor.sub_,
}
CODES: dict[How, int] = {"write": 0, "add": 1, "subtract": 2}
NATIVE_DTYPES = {torch.float16: 2, torch.bfloat16: 3}
NATIVE_NUMEL = 2**32  # from here on positions are left to the reference kernels


def runs_natively(*tensors: Tensor | None) -> bool:
    """Whether the native kernels can take these."""
    return native is not None and all(
        tensor is None or (tensor.device.type == "cpu" and tensor.is_contiguous()) for tensor in tensors
    )


def take_quantized(values: Tensor, block: int, bits: int, noise: Tensor | None) -> Tensor:
    """Block scales, then integers of 8 or 4 bits; what they say is taken away from the values."""
    if not runs_natively(values, noise) or values.dtype != torch.float32:
        message = reference.quantize(values, block, bits, noise)
        values.sub_(reference.dequantize(message, values.numel(), block, bits))
        return message
    count = values.numel()
    head = scales_bytes(count, block, bits)
    message = torch.empty(scaled_bytes(count, block, bits), dtype=torch.uint8)
    start = message.data_ptr()
    drawn = 0 if noise is None else noise.data_ptr()
    native.take_quantized(start, start + head, values.data_ptr(), drawn, count, block, bits)  # type: ignore[union-attr]
    return message


def dequantize(message: Tensor, out: Tensor, block: int, bits: int, how: How = "write") -> None:
    """Write the values of a message to `out`, or add or subtract them there."""
    numel = out.numel()
    if not runs_natively(message, out) or out.dtype != torch.float32:
        HOWS[how](out, reference.dequantize(message, numel, block, bits))
        return
    head = scales_bytes(numel, block, bits)
    expect_length(message, scaled_bytes(numel, block, bits), "quantized values")
    start, code = message.data_ptr(), CODES[how]
    native.dequantize(out.data_ptr(), start, start + head, numel, block, bits, code)  # type: ignore[union-attr]


def add_residual(out: Tensor, gradient: Tensor, residual: Tensor | None) -> float:
    """Write the sum of both, or the gradient alone, to `out`, which may be either; the largest magnitude of it.

    That is infinite or NaN if any value is.
    """
    if not runs_natively(out, gradient, residual) or gradient.dtype != torch.float32:
        return reference.add_residual(out, gradient, residual)
    of_residual = 0 if residual is None else residual.data_ptr()
    return float(
        native.add_residual(out.data_ptr(), gradient.data_ptr(), of_residual, out.numel())  # type: ignore[union-attr]
    )


def take_signs(values: Tensor, block: int) -> Tensor:
    """Mean magnitudes of blocks, then signs; what they say is taken away from the values."""
    if not runs_natively(values) or values.dtype != torch.float32:
        message = reference.pack_signs(values, block)
        values.sub_(reference.unpack_signs(message, values.numel(), block))
        return message
    count = values.numel()
    head = scales_bytes(count, block, bits=1)
    message = torch.empty(scaled_bytes(count, block, 1), dtype=torch.uint8)
    start = message.data_ptr()
    native.take_signs(start, start + head, values.data_ptr(), count, block)  # type: ignore[union-attr]
    return message


def unpack_signs(message: Tensor, out: Tensor, block: int, how: How = "write") -> None:
    """Write plus or minus the magnitude of the block to `out`, or add or subtract it there."""
    numel = out.numel()
    if not runs_natively(message, out) or out.dtype != torch.float32:
        HOWS[how](out, reference.unpack_signs(message, numel, block))
        return
    head = scales_bytes(numel, block, bits=1)
    expect_length(message, scaled_bytes(numel, block, 1), "signs")
    start, code = message.data_ptr(), CODES[how]
    native.unpack_signs(out.data_ptr(), start, start + head, numel, block, code)  # type: ignore[union-attr]


def select_largest(values: Tensor, count: int) -> Tensor:
    """The positions of so many entries of every row that are largest by magnitude, ascending."""
    if not runs_natively(values) or values.dtype != torch.float32 or values.shape[-1] >= NATIVE_NUMEL:
        return reference.select_largest(values, count)
    rows, columns = values.shape if values.dim() == 2 else (1, len(values))
    positions = torch.empty(rows * count, dtype=torch.int64)
    native.select_largest(positions.data_ptr(), values.data_ptr(), rows, columns, count)  # type: ignore[union-attr]
    return positions


def take_entries(values: Tensor, positions: Tensor, form: str) -> Tensor:
    """A message of the entries at these positions, ascending; what it says is taken away from them."""
    if not runs_natively(values, positions) or values.dtype != torch.float32 or values.numel() >= NATIVE_NUMEL:
        return entries.take_entries(values, positions, form)
    numel, count, number = values.numel(), len(positions), entries.FORMS.index(form)
    message = torch.empty(native.entries_room(count, numel, number), dtype=torch.uint8)  # type: ignore[union-attr]
    nbytes = native.take_entries(  # type: ignore[union-attr]
        message.data_ptr(), values.data_ptr(), numel, positions.data_ptr(), count, number
    )
    return message[:nbytes]


def mean_of_entries(out: Tensor, messages: list[Tensor], form: str) -> None:
    """The mean of what all ranks sent, added in order of rank."""
    if not runs_natively(out, *messages) or out.dtype != torch.float32 or out.numel() >= NATIVE_NUMEL:
        entries.mean_of_entries(out, messages, form)
        return
    starts, lengths = [message.data_ptr() for message in messages], [message.nbytes for message in messages]
    native.mean_of_entries(out.data_ptr(), out.numel(), starts, lengths, entries.FORMS.index(form))  # type: ignore[union-attr]


def narrow(values: Tensor, dtype: torch.dtype, saturates: bool = False) -> Tensor:
    """To 16-bit floats; what is too large becomes infinite, or the largest one."""
    if native is None or not runs_natively(values) or values.dtype != torch.float32:
        return reference.narrow(values, dtype, saturates)
    halves = torch.empty_like(values, dtype=dtype)
    kernel = native.narrow_saturated if saturates else native.narrow
    kernel(halves.data_ptr(), values.data_ptr(), values.numel(), NATIVE_DTYPES[dtype])
    return halves


def widen(out: Tensor, halves: Tensor) -> bool | None:
    """From 16-bit floats; whether all of it is finite, where that comes out on the way."""
    expect_length(halves.view(torch.uint8), 2 * out.numel(), "16-bit values")
    if native is None or not runs_natively(out, halves) or out.dtype != torch.float32:
        reference.widen(out, halves)
        return None
    finite: bool = native.widen(out.data_ptr(), halves.data_ptr(), out.numel(), NATIVE_DTYPES[halves.dtype])
    return finite
