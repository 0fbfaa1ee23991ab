"""The kernels of codecs in plain torch: they run on any device, and the native ones are tested against them.

Values are finite, as the pipeline looks before it encodes. Then every kernel here gives the bits of its native one, by
the same order of additions and the same choice among equals; only `low_rank.py` has a tolerance instead.

Messages are flat tensors of bytes. Every decoder checks what it is given before it writes anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.errors import CorruptMessage

LANES = 16  # sums of a block that run side by side, on every processor
SCALES = {8: torch.float32, 4: torch.float32, 1: torch.bfloat16}  # by the bits of a value


def scales_bytes(numel: int, block: int, bits: int) -> int:
    """Of the scales of all blocks."""
    return -(-numel // block) * SCALES[bits].itemsize


def scaled_bytes(numel: int, block: int, bits: int) -> int:
    """Of a message of block scales, then so many bits a value."""
    return scales_bytes(numel, block, bits) + packed_bytes(numel, bits)


def packed_bytes(numel: int, bits: int = 1) -> int:
    """Of values of so many bits."""
    return (numel * bits + 7) // 8


def scales_and_values(message: Tensor, numel: int, block: int, bits: int) -> tuple[Tensor, Tensor]:
    """The scales of a message, as a column, and its values; an error if they are more or fewer bytes than that."""
    expect_length(message, scaled_bytes(numel, block, bits), "signs" if bits == 1 else "quantized values")
    head = scales_bytes(numel, block, bits)
    return message[:head].clone().view(SCALES[bits]).to(torch.float32).unsqueeze(1), message[head:]


def quantize(values: Tensor, block: int, bits: int, noise: Tensor | None) -> Tensor:
    """Block scales, then integers of 8 or 4 bits; `noise` in [0, 1) rounds at random."""
    levels = 2 ** (bits - 1) - 1
    rows = padded(values, block).view(-1, block)
    scales = rows.abs().amax(1) / levels
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    ratio = rows / scales.unsqueeze(1)
    whole = ratio.round() if noise is None else (ratio + padded(noise, block).view(-1, block)).floor()
    codes = whole.clamp(-levels, levels).to(torch.int8).view(-1)[: values.numel()]
    return torch.cat([scales.view(torch.uint8), pack_nibbles(codes) if bits == 4 else codes.view(torch.uint8)])


def dequantize(message: Tensor, numel: int, block: int, bits: int) -> Tensor:
    """The values of a message."""
    scales, body = scales_and_values(message, numel, block, bits)
    codes = unpack_nibbles(body, numel) if bits == 4 else body.view(torch.int8)
    return (padded(codes.to(torch.float32), block).view(-1, block) * scales).view(-1)[:numel]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two integers of -7..7 in a byte, the first in the lower half."""
    halves = padded(codes, 2).view(-1, 2).to(torch.uint8) & 15
    return halves[:, 0] | halves[:, 1] << 4


def unpack_nibbles(message: Tensor, numel: int) -> Tensor:
    """The other way round."""
    both = torch.stack([message & 15, message >> 4], 1).view(-1)[:numel].to(torch.int8)
    return torch.where(both > 7, both - 16, both)


def pack_signs(values: Tensor, block: int) -> Tensor:
    """Mean magnitudes of blocks, then signs, eight in a byte."""
    rows = padded(values, block).view(-1, block)
    counts = torch.full((len(rows),), float(block), dtype=torch.float32, device=values.device)
    if values.numel() % block:
        counts[-1] = values.numel() % block
    scales = narrow(sums_of_magnitudes(rows) / counts, SCALES[1], saturates=True)
    return torch.cat([scales.view(torch.uint8), pack_bits(values >= 0)])


def sums_of_magnitudes(rows: Tensor) -> Tensor:
    """Sum of every row, in the native order: every 16th value, from the first to the last, then these sums likewise."""
    columns = -(-rows.shape[1] // LANES)
    lanes = torch.nn.functional.pad(rows.abs(), (0, columns * LANES - rows.shape[1])).view(len(rows), columns, LANES)
    return sum_in_order(sum_in_order(lanes, 1), 1)


def sum_in_order(values: Tensor, dim: int) -> Tensor:
    """Sum over a dimension from its first entry to its last, which `Tensor.sum` does not promise."""
    first, *others = values.unbind(dim)
    total = first.clone()
    for other in others:
        total += other
    return total


def unpack_signs(message: Tensor, numel: int, block: int) -> Tensor:
    """Plus or minus the magnitude of the block."""
    scales, body = scales_and_values(message, numel, block, bits=1)
    signs = unpack_bits(body, numel).to(torch.float32) * 2 - 1
    return (padded(signs, block).view(-1, block) * scales).view(-1)[:numel]


def pack_bits(bits: Tensor) -> Tensor:
    """Eight in a byte, the first in the lowest bit."""
    weights = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (padded(bits.to(torch.uint8), 8).view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack_bits(message: Tensor, numel: int) -> Tensor:
    """The other way round."""
    shifts = torch.arange(8, device=message.device, dtype=torch.uint8)
    return ((message.unsqueeze(1) >> shifts) & 1).view(-1)[:numel].bool()


def select_largest(values: Tensor, count: int) -> Tensor:
    """The positions of so many entries of every row that are largest by magnitude, ascending; of equal ones the first.

    Magnitudes are compared by their bits, as the native kernel does, because `topk` does not say which of equal ones
    it takes. NaN is larger than infinity.
    """
    if not count or not values.numel():
        return torch.empty(0, dtype=torch.int64, device=values.device)
    rows = magnitude_bits(values).view(-1, values.shape[-1])
    least = rows.topk(count, dim=1).values[:, -1:]
    larger, equal = rows > least, rows == least
    room = count - larger.sum(1, keepdim=True)
    return (larger | (equal & (equal.cumsum(1) <= room))).view(-1).nonzero().view(-1)


def magnitude_bits(values: Tensor) -> Tensor:
    """Bits of floats without their sign, as integers, which are in the order of the magnitudes."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.contiguous().view(whole) & torch.iinfo(whole).max


def padded(values: Tensor, multiple: int) -> Tensor:
    """With zeros at the end, up to a multiple."""
    missing = -values.numel() % multiple
    return torch.cat([values, values.new_zeros(missing)]) if missing else values


def expect_length(message: Tensor, nbytes: int, what: str) -> None:
    """Refuse a message of another length."""
    if message.numel() != nbytes:
        raise CorruptMessage(f"{message.numel()} bytes of {what} came where {nbytes} were expected")


def narrow(values: Tensor, dtype: torch.dtype, saturates: bool = False) -> Tensor:
    """To 16-bit floats; what is too large becomes infinite, or the largest one."""
    most = torch.finfo(dtype).max
    return (values.clamp(-most, most) if saturates else values).to(dtype)


def widen(out: Tensor, halves: Tensor) -> None:
    """From 16-bit floats."""
    out.copy_(halves)


def add_residual(out: Tensor, gradient: Tensor, residual: Tensor | None) -> float:
    """Write the sum of both, or the gradient alone; the largest magnitude, which is not finite if any value is not."""
    if residual is not None:
        torch.add(gradient, residual, out=out)
    elif out is not gradient:
        out.copy_(gradient)
    if not out.numel():
        return 0.0
    lowest, highest = torch.aminmax(out)
    return float(torch.maximum(highest, -lowest))
