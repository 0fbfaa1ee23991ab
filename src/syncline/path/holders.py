"""Whether somebody else holds gradients: over `zero_grad()`, detached, in a view, in numpy.

A gradient that is held by itself has one more reference in Python, and memory that is held through another tensor has
one more tensor on its storage. The latter torch tells by a private call only; where that is missing, such holders are
not seen and find the gradients of the next pass in their tensors, which a warning says.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.core.torch_internals import counts_tensors

log = logging.getLogger(__name__)


def count_references(tensors: Sequence[Tensor]) -> int:
    """The most references that Python has to any of these tensors, with those of the caller."""
    return max([sys.getrefcount(one) for one in tensors], default=0)


def warn_of_blindness() -> None:
    """Say what this torch does not tell."""
    if not counts_tensors:
        log.warning(
            "torch %s does not tell who holds the memory of gradients: clone those that you keep over zero_grad()",
            torch.__version__,
        )
