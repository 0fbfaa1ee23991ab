"""Samples of how good what a codec sends is, of some entries of a bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.tracing.quality import Quality

MOST_SAMPLED = 1 << 16  # entries of a bucket


@dataclass(frozen=True)
class Sample:
    """What a bucket was before a codec had it, to compare with."""

    step: int
    norm: float  # of what was to be sent
    dense: Tensor  # some entries of the mean over ranks, had all been sent


def some_of(values: Tensor) -> Tensor:
    """Entries all over a bucket, at a distance that is odd, so that they are not all of one column."""
    return values[:: (len(values) // MOST_SAMPLED) | 1]


def quality_of(number: int, sample: Sample, left: float | None, mean: Tensor, positions: str) -> Quality:
    """How much was left out, and whether what came out points where it should.

    Where no residual is `left`, what came out is compared with what should have.
    """
    came_out = some_of(mean).to(sample.dense.dtype)
    cosine = float(torch.cosine_similarity(came_out, sample.dense, dim=0))
    if left is None:
        missing = float((came_out - sample.dense).norm()) / max(float(sample.dense.norm()), 1e-30)
        return Quality(sample.step, number, missing, 0.0, cosine, positions)
    return Quality(sample.step, number, left / max(sample.norm, 1e-30), left, cosine, positions)
