"""Whether somebody else holds gradients: over `zero_grad()`, detached, in a view, in numpy.

A gradient that is held by itself has one more reference in Python, and memory that is held through another tensor has
one more tensor on its storage. The latter torch tells by a private call only; where that is missing, such holders are
not seen and find the gradients of the next pass in their tensors, which a warning says.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

log = logging.getLogger(__name__)
use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def count_tensors(values: Tensor) -> int:
    """Number of tensors on the storage of `values`; always 0 where torch does not tell."""
    return use_count(values.untyped_storage()._cdata) if use_count is not None else 0


def count_references(tensors: Sequence[Tensor]) -> int:
    """The most references that Python has to any of these tensors, with those of the caller."""
    return max([sys.getrefcount(one) for one in tensors], default=0)


def warn_of_blindness() -> None:
    """Say what this torch does not tell."""
    if use_count is None:
        log.warning(
            "torch %s does not tell who holds the memory of gradients: clone those that you keep over zero_grad()",
            torch.__version__,
        )
