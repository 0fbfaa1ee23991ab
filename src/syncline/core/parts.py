"""A flat buffer and its named parts: where the values of each parameter are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class NamedParameter(Protocol):
    """A parameter whose gradient is in a bucket."""

    @property
    def name(self) -> str: ...
    @property
    def parameter(self) -> Tensor: ...


class Part(NamedTuple):
    """A parameter's place in the values of a bucket."""

    name: str
    lo: int
    hi: int
    shape: torch.Size


def parts_of(named: Sequence[NamedParameter]) -> tuple[Part, ...]:
    """The places of parameters that follow each other without gaps."""
    parts, start = [], 0
    for one in named:
        numel = one.parameter.numel()
        parts.append(Part(one.name, start, start + numel, one.parameter.shape))
        start += numel
    return tuple(parts)


def numel_of(parts: Sequence[Part]) -> int:
    """Elements of all these parameters."""
    return sum(part.hi - part.lo for part in parts)
