"""Values as bytes that another rank reads without running anything: JSON for what they are made of, and raw tensors.

    length of the JSON | JSON, filled up with spaces | tensor 0 | tensor 1 | ...       (each from a whole word on)

What JSON has no word for is an object with one key: {"tuple": [...]} and other kinds of lists, {"dict": [[key, value],
...]}, {"dtype": n}, and {"tensor": n} for a tensor, whose dtype and shape stand at the end of the JSON. Reading checks
every length before it is believed.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from syncline.errors import ConfigError, CorruptMessage

WORD_BYTES = 8
MOST_DIMENSIONS, MOST_SIZE = 64, 1 << 60  # of a tensor: to multiply what anybody may claim would take long
LISTS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.bool,
    torch.int16,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def write_message(value: Any) -> Tensor:
    """Numbers, texts, None, tensors and their types, and lists, tuples, sets and dicts of these, as words."""
    tensors: list[Tensor] = []
    try:
        built = _build(value, tensors)
    except RecursionError:
        raise ConfigError("a value that contains itself, or is nested too deeply, cannot be sent to a rank") from None
    tables = [[DTYPES.index(tensor.dtype), list(tensor.shape)] for tensor in tensors]
    try:
        text = json.dumps([built, tables], separators=(",", ":")).encode()
    except ValueError as error:
        raise ConfigError(f"a number cannot be sent to a rank: {error}") from None
    text += b" " * (-len(text) % WORD_BYTES)
    pieces = [torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.int64)]
    return torch.cat([*pieces, *(_words_of(tensor) for tensor in tensors)])


def read_message(words: Tensor) -> Any:
    """What was written; `CorruptMessage` for anything else."""
    try:
        return _read(words)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, RuntimeError) as error:
        raise CorruptMessage(f"{8 * len(words)} bytes are no message: {error!r}") from None


def _build(value: Any, tensors: list[Tensor]) -> Any:
    """A value in words of JSON; tensors are put aside."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype) and value in DTYPES:
        return {"dtype": DTYPES.index(value)}
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES or value.layout is not torch.strided:
            raise ConfigError(f"a tensor of {value.dtype} and {value.layout} cannot be sent to a rank")
        tensors.append(value.detach().resolve_conj().resolve_neg())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list):
        return [_build(one, tensors) for one in value]
    for kind, make in LISTS.items():
        if isinstance(value, make):  # type: ignore[arg-type]
            return {kind: [_build(one, tensors) for one in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_build(key, tensors), _build(one, tensors)] for key, one in value.items()]}
    raise ConfigError(
        f"{type(value).__qualname__} cannot be sent to a rank; keep numbers, texts, tensors, and lists, tuples, sets "
        f"and dicts of these in the state of an optimizer and in its groups"
    )


def _words_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, filled up to whole words."""
    row = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return torch.cat([row, row.new_zeros(-row.numel() % WORD_BYTES)]).view(torch.int64)


def _read(words: Tensor) -> Any:
    nbytes, row = int(words[0]), words[1:].view(torch.uint8)
    if not 0 <= nbytes <= len(row):
        raise ValueError(f"its text is said to have {nbytes} bytes")
    built, tables = json.loads(row[:nbytes].numpy().tobytes())
    tensors, start = [], nbytes
    for code, shape in tables:
        is_shape = len(shape) <= MOST_DIMENSIONS and all(type(size) is int and 0 <= size < MOST_SIZE for size in shape)
        if not (0 <= code < len(DTYPES) and is_shape):
            raise ValueError(f"a tensor is said to be of type {code} and to have {len(shape)} dimensions")
        end = start + math.prod(shape) * DTYPES[code].itemsize
        if end > len(row):
            raise ValueError(f"a tensor is said to end at byte {end}")
        tensors.append(row[start:end].clone().view(DTYPES[code]).view(shape))
        start = end + -end % WORD_BYTES
    if start != len(row):
        raise ValueError(f"{len(row) - start} bytes are left over")
    return _rebuild(built, tensors)


def _rebuild(built: Any, tensors: list[Tensor]) -> Any:
    """The value that was built; tensors come in again."""
    if isinstance(built, list):
        return [_rebuild(one, tensors) for one in built]
    if not isinstance(built, dict):
        return built
    ((kind, inside),) = built.items()
    if kind == "tensor":
        if not 0 <= inside < len(tensors):
            raise ValueError(f"there is no tensor {inside}")
        return tensors[inside]
    if kind == "dtype":
        return DTYPES[inside]
    if kind in LISTS:
        return LISTS[kind]([_rebuild(one, tensors) for one in inside])
    if kind == "dict":
        return {_rebuild(key, tensors): _rebuild(one, tensors) for key, one in inside}
    raise ValueError(f"there is no kind {kind!r}")
