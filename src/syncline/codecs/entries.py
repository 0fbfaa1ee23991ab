"""Messages of chosen entries, in plain torch: they run on any device, and the native ones are tested against them.

    message    count, bytes of positions (int64 each) | positions | values

Values are float32, float16, or integers of 8 bits with a scale for every 256 of them. A value that is too large for
float16 goes as its largest number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.codecs.conversation import Declaration
from syncline.codecs.indices import decode_indices, encode_indices, indices_room, way_of
from syncline.codecs.kernels import reference
from syncline.errors import CorruptMessage

FORMS = ("fp32", "fp16", "int8")  # of values; the native ones are numbered so
BLOCK = 256
HEADER_BYTES = 16


def take_entries(values: Tensor, positions: Tensor, form: str) -> Tensor:
    """A message of the entries at these positions, ascending; what it says is taken away from them."""
    message = write_message(positions, values[positions], values.numel(), form)
    _, sent = read_message(message, values.numel(), form)
    values[positions] -= sent.to(values.device)
    return message


def mean_of_entries(out: Tensor, messages: list[Tensor], form: str) -> None:
    """The mean of what all ranks sent, added in order of rank."""
    read = [read_message(message, out.numel(), form) for message in messages]
    out.zero_()
    for positions, values in read:
        out.index_add_(0, positions.to(out.device), values.to(out.device))
    out.div_(len(messages))


def write_message(positions: Tensor, values: Tensor, numel: int, form: str) -> Tensor:
    """Positions and values as bytes."""
    written = encode_indices(positions, numel)
    header = torch.tensor([len(positions), len(written)]).view(torch.uint8)
    return torch.cat([header, written, write_values(values.cpu(), form)])


def most_bytes(count: int, numel: int, form: str) -> int:
    """The most bytes that a message of `count` entries has, whichever they are."""
    return HEADER_BYTES + indices_room(count, numel) + value_bytes(count, form)


def declare_entries(count: int, numel: int, form: str, world: int) -> Declaration:
    """The gather of messages of up to `count` entries each; how long they are hangs on which entries are chosen."""
    return Declaration("gather", (most_bytes(count, numel, form),) * world, is_bound=True)


def value_bytes(count: int, form: str) -> int:
    """Bytes of so many values."""
    return reference.scaled_bytes(count, BLOCK, 8) if form == "int8" else count * (2 if form == "fp16" else 4)


def length_of(message: Tensor, form: str) -> int:
    """Bytes of a message without the zeros that fill it up, as it announces; whether that can be is not said."""
    if len(message) < HEADER_BYTES:
        return len(message)
    count, length = message[:HEADER_BYTES].clone().view(torch.int64).tolist()
    if not (0 <= count < 2**58 and 0 <= length <= len(message)):
        return len(message)
    end = HEADER_BYTES + length + value_bytes(count, form)
    return len(message) if message[end:].any() else end  # with anything but zeros behind it, it is too long


def positions_of(message: Tensor) -> str:
    """How the positions of a message were written, for reports: `"bitmap"`, `"short"` or `"rice"`."""
    return way_of(message[HEADER_BYTES:])


def write_values(values: Tensor, form: str) -> Tensor:
    """As bytes."""
    if form == "int8":
        return reference.quantize(values, BLOCK, 8, None)
    return (reference.narrow(values, torch.float16, saturates=True) if form == "fp16" else values).view(torch.uint8)


def read_message(message: Tensor, numel: int, form: str) -> tuple[Tensor, Tensor]:
    """Positions and values, checked."""
    message = message.cpu()
    if len(message) < HEADER_BYTES:
        raise CorruptMessage(f"{len(message)} bytes are no message of entries")
    count, length = message[:HEADER_BYTES].clone().view(torch.int64).tolist()
    if not (0 <= count <= numel and 0 <= length <= len(message) - HEADER_BYTES):
        raise CorruptMessage(f"a message of {len(message)} bytes announces {count} entries of {numel}")
    positions = decode_indices(message[HEADER_BYTES : HEADER_BYTES + length], count, numel)
    body = message[HEADER_BYTES + length : length_of(message, form)]
    if form == "int8":
        return positions, reference.dequantize(body, count, BLOCK, 8)
    dtype = torch.float16 if form == "fp16" else torch.float32
    reference.expect_length(body, count * dtype.itemsize, "values")
    return positions, body.clone().view(dtype).to(torch.float32)
