"""Error feedback costs two copies of the gradients in fp32, or one where it is to be lean, in real processes."""

from __future__ import annotations

from functools import cache, partial

import pytest

import syncline
from support.weighed import BUCKET_BYTES, GRADIENT_BYTES, Weighed, weigh

NOISE_BYTES = 4 << 20  # the kernel counts pages in batches, and a bucket may be freed late
COPIES = 2  # parameters and gradients; residuals come on top


@cache
def weighed(codec: str, lean: bool = False) -> list[Weighed]:
    """Every rank."""
    return syncline.run(partial(weigh, codec=codec, lean=lean), ranks=2, fabric="shm")


@pytest.mark.parametrize("codec", ["topk:0.01", "int8", "onebit", "powersgd:4", "rules:codec=(topk:0.01)"])
@pytest.mark.parametrize(("lean", "residuals"), [(False, 2), (True, 1)])
def test_error_feedback_costs_two_residuals_or_one(codec: str, lean: bool, residuals: int) -> None:
    """Besides there may be the messages of a step, and three buckets that are worked on."""
    for plain, coded in zip(weighed("none"), weighed(codec, lean), strict=True):
        allowed = coded.said_bytes + 3 * BUCKET_BYTES + NOISE_BYTES
        assert allowed < 0.8 * GRADIENT_BYTES  # another copy would be noticed
        assert coded.peak_bytes >= (COPIES + residuals) * GRADIENT_BYTES - NOISE_BYTES  # all these are written to
        assert coded.peak_bytes <= (COPIES + residuals) * GRADIENT_BYTES + allowed
        assert coded.peak_bytes - plain.peak_bytes <= residuals * GRADIENT_BYTES + allowed
