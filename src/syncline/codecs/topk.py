"""The largest entries by magnitude. Wire: for each entry kept its value and 5 to 16 bits for its position.

    message    count, bytes of positions (int64 each) | positions | values

`select="exact"` takes exactly the largest; `"sampled"` takes those above a threshold that a random sample suggests,
which is faster on devices where sorting is slow, and within 0.7 and 1.3 of the number wanted: more are thinned by
size, never by position. What is not sent is kept and sent later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs import kernels
from syncline.codecs.codec import Codec, Place, State
from syncline.codecs.conversation import Conversation, Gather
from syncline.codecs.indices import decode_indices, encode_indices
from syncline.errors import ConfigError, CorruptMessage, UnknownName

SELECTIONS = ("exact", "sampled")
VALUES = ("fp32", "fp16", "int8")
BLOCK = 256  # of int8 values that share a scale
LEAST_SAMPLE = 4096
MOST_TRIES = 10
HEADER_BYTES = 16


@dataclass(frozen=True)
class TopK(Codec):
    """A fraction of entries, the largest ones."""

    name: ClassVar[str] = "topk"
    feedback: ClassVar[bool] = True  # type: ignore[misc]
    keep: float = 0.01  # fraction of entries sent; smaller compresses more
    values: str = "fp32"  # or "fp16", "int8"; what rounding takes away is kept
    select: str = "exact"  # or "sampled"

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep={self.keep} is not a fraction above 0 and up to 1; try topk:0.01")
        if self.values not in VALUES:
            raise UnknownName("values", self.values, VALUES)
        if self.select not in SELECTIONS:
            raise UnknownName("select", self.select, SELECTIONS)

    def reduce(self, values: Tensor, state: State, place: Place) -> Conversation:
        """One gather."""
        chosen = self.choose(values, place)
        message = write_message(chosen, values[chosen], values.numel(), self.values)
        _, sent = read_message(message, values.numel(), self.values)
        values[chosen] -= sent.to(values.device)
        messages = yield Gather(message)
        return lambda out: add_messages(out, messages, self.values)

    def count(self, numel: int) -> int:
        """How many entries of so many."""
        return min(numel, max(1, round(self.keep * numel)))

    def choose(self, values: Tensor, place: Place) -> Tensor:
        """Positions, ascending."""
        wanted = self.count(values.numel())
        if self.select == "exact" or wanted == values.numel():
            return kernels.select_largest(values, wanted)
        return select_sampled(values, wanted, place.generator(values.device, place.rank, "sample"))


def select_sampled(values: Tensor, wanted: int, generator: torch.Generator) -> Tensor:
    """Positions above a threshold that a sample suggests: about as many as wanted."""
    numel = values.numel()
    sizes = values.abs()
    sample = sizes[torch.randint(numel, (max(LEAST_SAMPLE, numel // 256),), generator=generator, device=values.device)]
    rank = max(1, round(wanted / numel * len(sample)))
    threshold = float(sample.topk(rank).values[-1])
    for _ in range(MOST_TRIES):
        found = (sizes > threshold).nonzero().view(-1)
        if len(found) > 1.3 * wanted:
            return found[kernels.select_largest(values[found], wanted)]
        if len(found) >= 0.7 * wanted:
            return found
        threshold *= 0.7
    return kernels.select_largest(values, wanted)


def write_message(indices: Tensor, values: Tensor, numel: int, form: str) -> Tensor:
    """Positions and values as bytes."""
    positions = encode_indices(indices, numel)
    header = torch.tensor([len(indices), len(positions)]).view(torch.uint8)
    if form == "int8":
        body = kernels.quantize(values.cpu(), BLOCK, 8, None)
    else:
        body = values.to(torch.float16 if form == "fp16" else torch.float32).cpu().view(torch.uint8)
    return torch.cat([header, positions, body])


def read_message(message: Tensor, numel: int, form: str) -> tuple[Tensor, Tensor]:
    """Positions and values, checked."""
    message = message.cpu()
    if len(message) < HEADER_BYTES:
        raise CorruptMessage(f"{len(message)} bytes are no message of entries")
    count, length = message[:HEADER_BYTES].clone().view(torch.int64).tolist()
    if not (0 <= count <= numel and 0 <= length <= len(message) - HEADER_BYTES):
        raise CorruptMessage(f"a message of {len(message)} bytes announces {count} entries of {numel}")
    indices = decode_indices(message[HEADER_BYTES : HEADER_BYTES + length], count, numel)
    body = message[HEADER_BYTES + length :]
    if form == "int8":
        return indices, kernels.dequantize(body, count, BLOCK, 8)
    dtype = torch.float16 if form == "fp16" else torch.float32
    if len(body) != count * dtype.itemsize:
        raise CorruptMessage(f"{len(body)} bytes of values came for {count} entries")
    return indices, body.clone().view(dtype).to(torch.float32)


def add_messages(out: Tensor, messages: list[Tensor], form: str) -> None:
    """The mean of what all ranks sent, added in order of rank."""
    read = [read_message(message, out.numel(), form) for message in messages]
    out.zero_()
    for indices, values in read:
        out.index_add_(0, indices.to(out.device), values.to(out.device))
    out.div_(len(messages))
