"""Ranks that differ from the start are shown what differs."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

import syncline
from support import layouts
from support.catalogue import FABRICS, PROCESS_FABRICS, one_now_others_slow
from support.layouts import LAYOUTS
from support.replicas import WORLD
from syncline import Deadlines
from syncline.guards.claims import dense_strides

NEVER = 9  # more steps than there are


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
    "strides": ("parameter second.weight float32[8, 8]", "parameter second.weight float32[8, 8] strides [1, 8]"),
    "tied": ("parameter second.bias float32[8]", ""),
    "aliased": ("parameter second.bias float32[8]", "parameter second.bias float32[8] in the memory of first.bias"),
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


ON_ONE_RANK_AT_FIRST = {1: [0]}  # before there are buckets
BEFORE_SYNC = {0: [-1], 1: [-1]}  # on all ranks
ON_ALL_RANKS_LATER = {0: [2], 1: [2]}
MODES = ["sync", "delayed", "local:2", "local:2,warmup=2", "slowmo:2", "diloco:2", "bounded:ahead=0"]


@pytest.mark.parametrize(
    ("mode", "converts", "unfreezes"),
    [
        *((mode, BEFORE_SYNC, NEVER) for mode in [*MODES, "bounded:ahead=0,compensation=0.04"]),
        *((mode, ON_ONE_RANK_AT_FIRST, NEVER) for mode in MODES),
        *((mode, ON_ALL_RANKS_LATER, NEVER) for mode in MODES),
        *((mode, {1: [1]}, 2) for mode in MODES[:2]),  # others refuse what is unfrozen after Sync
    ],
)
def test_a_memory_format_changes_nothing(mode: str, converts: dict[int, list[int]], unfreezes: int) -> None:
    found, usual = (
        syncline.run(
            partial(layouts.convert_between_steps, converts=some, unfreezes=unfreezes, mode=mode), 2, "threads"
        )
        for some in (converts, {})
    )
    for mine, wanted in zip(found, usual, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fabric", ["threads", *one_now_others_slow(PROCESS_FABRICS)])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ranks_with_other_memory_formats_are_shown_the_parameter(mode: str, fabric: str) -> None:
    for said in syncline.run(partial(layouts.say_of_formats, odd=1, mode=mode), 2, fabric, Deadlines(20.0)):
        assert "+parameter first.weight float32[4, 3, 3, 3] strides [27, 1, 9, 3]" in said
        assert "parameter second.weight float32[2, 4, 1, 1] strides" not in said  # which are the same in memory


@pytest.mark.parametrize("buffers", ["broadcast", "average", "local"])
def test_buffers_may_have_other_memory_formats(buffers: str) -> None:
    wanted = torch.arange(24.0).view(1, 2, 3, 4)
    for mask in syncline.run(partial(layouts.settle_formats, buffers=buffers), 2, "threads"):
        assert torch.equal(mask, wanted)


def test_strides_that_leave_gaps_or_are_of_dimensions_of_size_1_make_no_difference() -> None:
    plain = torch.zeros(4, 1, 3)
    others = [torch.zeros(4, 2, 3)[:, :1], torch.zeros(4, 1, 6)[..., ::2], plain.as_strided((4, 1, 3), (3, 77, 1))]
    assert {dense_strides(tensor) for tensor in [plain, *others]} == {plain.stride()}
    assert dense_strides(torch.zeros(3, 1, 4).permute(2, 1, 0)) == (1, 3, 4)
    assert dense_strides(torch.zeros(())) == ()
    assert dense_strides(torch.zeros(0, 3).t()) == torch.zeros(3, 0).stride()
