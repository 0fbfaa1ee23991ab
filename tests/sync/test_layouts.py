"""Ranks that differ from the start are shown what differs."""

from __future__ import annotations

from functools import cache, partial

import pytest

import syncline
from support import layouts
from support.catalogue import FABRICS
from support.layouts import LAYOUTS
from support.replicas import WORLD
from syncline import Deadlines


@cache
def odd_ranks(fabric: str, odd: int) -> list[dict[str, tuple[str, str, bool, float]]]:
    """One life of three ranks, of which one is odd in every way, one after the other."""
    return syncline.run(partial(layouts.differ_in_layout, odd=odd), WORLD, fabric, Deadlines(20.0))


LINES = {
    "names": ("parameter third.weight float32[4, 8]", "parameter fourth.weight float32[4, 8]"),
    "shapes": ("parameter third.bias float32[4]", "parameter third.bias float32[5]"),
    "dtypes": ("parameter third.weight float32[4, 8]", "parameter third.weight float64[4, 8]"),
    "order": ("parameter first.bias float32[8]", "parameter first.bias float32[8]"),
    "requires_grad": ("parameter first.bias float32[8]", "parameter first.bias float32[8] frozen"),
    "buffers": ("", "buffer mask float32[3]"),
    "settings": ("bucket_bytes=26214400", "bucket_bytes=1234"),
}


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("difference", LAYOUTS)
def test_ranks_with_different_layouts_are_shown_the_line_and_nothing_changes(fabric: str, difference: str) -> None:
    for found in odd_ranks(fabric, odd=1):
        error, message, is_unchanged, afterwards = found[difference]
        assert error == "LayoutMismatch", message
        assert "ranks [1] differ from rank 0" in message
        shown = message.splitlines()
        for sign, line in zip("-+", LINES[difference], strict=True):
            assert any(one.startswith(sign) and line in one for one in shown), message
        assert is_unchanged
        assert afterwards == 6.0


@pytest.mark.parametrize("difference", LAYOUTS)
def test_all_others_differ_where_rank_0_is_the_odd_one(difference: str) -> None:
    for found in odd_ranks("threads", odd=0):
        assert "ranks [1, 2] differ from rank 0" in found[difference][1]
