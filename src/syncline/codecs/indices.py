"""How positions are written: ascending numbers below `numel`, in the fewest bytes of three ways.

    bitmap    a bit for every position                                               dense selections
    short     a count for each 65536 positions, then two bytes for each              any
    rice      gaps: the upper bits in unary, the lower ones as they are              sparse selections

Both streams of Rice codes are written apart, so they are read and written without a loop. A message begins with the way
(one byte), the Rice parameter (one byte) and six bytes of zero. Bits that are left over are zero, and nothing follows:
whatever is not as it would have been written is refused.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from syncline.errors import CorruptMessage

BITMAP, SHORT, RICE = range(3)
WAYS = ("bitmap", "short", "rice")
HEADER = 8
PAGE = 65536
MOST_LOWER_BITS = 40
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


def indices_room(count: int, numel: int) -> int:
    """Bytes that are enough for any `count` positions: the least of the closed bounds of the three ways."""
    parameter = rice_parameter(count, numel)
    gaps = -(-(count + (max(numel - count, 0) >> parameter)) // 8) + -(-count * parameter // 8)
    return HEADER + min(-(-numel // 8), 4 * -(-numel // PAGE) + 2 * count, gaps)


def encode_indices(indices: Tensor, numel: int) -> Tensor:
    """Ascending positions to bytes."""
    found = indices.cpu().numpy()
    gaps = np.diff(found, prepend=-1) - 1
    parameter = rice_parameter(len(found), numel)
    upper = gaps >> parameter
    sizes = {
        BITMAP: -(-numel // 8),
        SHORT: 4 * -(-numel // PAGE) + 2 * len(found),
        RICE: -(-(int(upper.sum()) + len(found)) // 8) + -(-len(found) * parameter // 8),
    }
    way = min(sizes, key=lambda name: sizes[name])
    body = {
        BITMAP: lambda: bitmap_of(found, numel),
        SHORT: lambda: shorts_of(found, numel),
        RICE: lambda: rice_of(gaps, upper, parameter),
    }[way]()
    head = np.array([way, parameter, 0, 0, 0, 0, 0, 0], np.uint8)
    return torch.from_numpy(np.concatenate([head, body]))


def decode_indices(message: Tensor, count: int, numel: int) -> Tensor:
    """Bytes to ascending positions, all of them checked."""
    raw = message.cpu().numpy()
    if len(raw) < HEADER or raw[0] > RICE or raw[2:HEADER].any():
        raise CorruptMessage(f"positions in {len(raw)} bytes do not begin as they should")
    body, parameter = raw[HEADER:], int(raw[1])
    if raw[0] == BITMAP:
        found = read_bitmap(body, numel)
    elif raw[0] == SHORT:
        found = read_shorts(body, numel)
    else:
        found = read_rice(body, count, numel, parameter)
    if len(found) != count or (count and (found.min() < 0 or found.max() >= numel or (np.diff(found) <= 0).any())):
        raise CorruptMessage(f"{len(found)} positions came that are not {count} ascending ones below {numel}")
    return torch.from_numpy(found.astype(np.int64))


def way_of(message: Tensor) -> str:
    """How positions were written, for reports."""
    return WAYS[int(message[0])]


def rice_parameter(count: int, numel: int) -> int:
    """The number of lower bits that is best for gaps of a random selection."""
    return max(0, int(math.log2(max(math.log(2) * numel / max(count, 1), 1))))


def bitmap_of(found: Numbers, numel: int) -> Bytes:
    bits = np.zeros(numel, np.uint8)
    bits[found] = 1
    return np.packbits(bits, bitorder="little")


def read_bitmap(body: Bytes, numel: int) -> Numbers:
    if len(body) != -(-numel // 8):
        raise CorruptMessage(f"{len(body)} bytes are no bitmap of {numel} positions")
    return np.flatnonzero(np.unpackbits(body, bitorder="little"))


def shorts_of(found: Numbers, numel: int) -> Bytes:
    counts = np.bincount(found // PAGE, minlength=-(-numel // PAGE)).astype("<u4")
    return np.concatenate([counts.view(np.uint8), (found % PAGE).astype("<u2").view(np.uint8)])


def read_shorts(body: Bytes, numel: int) -> Numbers:
    pages = -(-numel // PAGE)
    if len(body) < 4 * pages:
        raise CorruptMessage("positions end before their counts do")
    counts = body[: 4 * pages].copy().view("<u4").astype(np.int64)
    rest = body[4 * pages :]
    if counts.sum() * 2 != len(rest):
        raise CorruptMessage(f"{len(rest)} bytes of positions came where {2 * counts.sum()} were announced")
    return np.repeat(np.arange(pages) * PAGE, counts) + rest.copy().view("<u2").astype(np.int64)


def rice_of(gaps: Numbers, upper: Numbers, parameter: int) -> Bytes:
    unary = np.ones(int(upper.sum()) + len(upper), np.uint8)
    unary[np.cumsum(upper + 1) - 1] = 0  # as many ones as the upper bits say, then a zero
    lower = (gaps[:, None] >> np.arange(parameter)) & 1
    return np.concatenate(
        [np.packbits(unary, bitorder="little"), np.packbits(lower.astype(np.uint8).reshape(-1), bitorder="little")]
    )


def read_rice(body: Bytes, count: int, numel: int, parameter: int) -> Numbers:
    lower_bytes = -(-count * parameter // 8)
    if parameter > MOST_LOWER_BITS or lower_bytes > len(body):
        raise CorruptMessage("positions end before their lower bits do")
    unary = np.unpackbits(body[: len(body) - lower_bytes], bitorder="little")
    ends = np.flatnonzero(unary == 0)[:count]
    used = int(ends[-1]) + 1 if len(ends) else 0
    bits = np.unpackbits(body[len(body) - lower_bytes :], bitorder="little")
    if len(ends) < count or len(unary) - used >= 8 or unary[used:].any() or bits[count * parameter :].any():
        raise CorruptMessage(f"{len(ends)} positions came where {count} were announced, or something follows them")
    upper = np.diff(ends, prepend=-1) - 1
    if (upper > numel >> parameter).any():
        raise CorruptMessage(f"there are gaps wider than {numel}")
    rows = bits[: count * parameter].reshape(count, parameter)
    lower = (rows.astype(np.int64) << np.arange(parameter)).sum(1) if parameter else 0
    return np.cumsum((upper.astype(np.int64) << parameter) + lower + 1) - 1
