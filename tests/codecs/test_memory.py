"""Error feedback costs one copy of the gradients in fp32, and no more: the peak of real processes is measured."""

from __future__ import annotations

from functools import cache, partial

import pytest

import syncline
from support.weighed import BUCKET_BYTES, GRADIENT_BYTES, Weighed, weigh

NOISE_BYTES = 2 << 20
COPIES = 3  # parameters, gradients, and what is kept


@cache
def weighed(codec: str) -> list[Weighed]:
    """Every rank."""
    return syncline.run(partial(weigh, codec=codec), ranks=2, fabric="shm")


@pytest.mark.parametrize("codec", ["topk:0.01", "int8", "onebit", "powersgd:4", "rules:codec=(topk:0.01)"])
def test_error_feedback_costs_one_copy_of_the_gradients(codec: str) -> None:
    """Besides it there may be the messages of a step, and two buckets that are worked on."""
    for plain, coded in zip(weighed("none"), weighed(codec), strict=True):
        allowed = coded.said_bytes + 2 * BUCKET_BYTES + NOISE_BYTES
        assert allowed < 0.8 * GRADIENT_BYTES  # another copy would be noticed
        assert coded.peak_bytes >= COPIES * GRADIENT_BYTES  # it is measured: all these are written to
        assert coded.peak_bytes <= COPIES * GRADIENT_BYTES + allowed
        assert coded.peak_bytes - plain.peak_bytes <= GRADIENT_BYTES + allowed
