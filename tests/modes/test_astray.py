"""Ranks that go astray when others have no data any more: nobody else has learned anything that they could take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import syncline
from support.astray import LARGE, Joined, Straying
from support.on_a_line import RATE, Line, slope_of
from support.references import same_bits
from support.trainees import DEADLINES, place_of

MODES = ("local:every=3", "slowmo:every=3", "diloco:every=3", "local:every=3,optimizer=average")


def after_joins(straying: Straying, fabric: str = "threads") -> list[tuple[Joined, ...]]:
    """What ranks have after each `join`, and at the end."""
    ranks = syncline.run(straying, len(straying.counts), fabric, DEADLINES)
    return list(zip(*ranks, strict=True))


def assert_equal_and_finite(ranks: Sequence[Joined]) -> None:
    for rank in ranks:
        assert not rank.error
        assert rank.place.isfinite().all()
        assert same_bits(rank.place, ranks[0].place)
        for own, first in zip(rank.others, ranks[0].others, strict=True):
            assert own.isfinite().all()
            assert same_bits(own, first)


@pytest.mark.sampled(31)
@pytest.mark.parametrize("value", [torch.nan, LARGE])
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("counts", "strays"),
    [
        ((3, 5, 3), {1: 5}),  # the others have no data since they met
        ((3, 6, 3), {1: 6}),  # it has none any more either
        ((3, 5, 5), {1: 5, 2: 4}),
        ((0, 2, 0), {1: 1}),  # before ranks have met at all
        ((4, 3, 4), {0: 4}),  # not the last one that it has
        ((4, 4, 4), {0: 4, 1: 4}),
    ],
    ids=str,
)
def test_a_rank_that_goes_astray_in_its_last_steps_has_what_the_others_have(
    mode: str, codec: str, value: float, counts: tuple[int, ...], strays: dict[int, int]
) -> None:
    joined, trained_on = after_joins(Straying(mode, counts, strays, value, codec))
    assert_equal_and_finite(joined)
    assert all(rank.place.isfinite().all() for rank in trained_on)


def test_ranks_have_the_same_buffers_too_where_these_are_local() -> None:
    joined, _ = after_joins(Straying("local:every=3", (3, 5, 3), {1: 5}, settings={"buffers": "local"}))
    assert_equal_and_finite(joined)


def test_processes_do_the_same() -> None:
    joined, _ = after_joins(Straying("diloco:every=3", (3, 5, 3), {1: 5}), "shm")
    assert_equal_and_finite(joined)


def test_a_rank_that_goes_astray_alone_begins_again_where_the_others_are() -> None:
    """It has data for two more periods, and only the first of them is lost."""
    mode = "local:every=3"
    (strayed, _), (spared, _) = (after_joins(Straying(mode, (3, 9, 3), strays)) for strays in ({1: 5}, {}))
    (stayed, _) = after_joins(Straying(mode, (3, 3, 3), {}))
    assert_equal_and_finite(strayed)
    assert not same_bits(strayed[0].place, stayed[0].place)
    assert not same_bits(strayed[0].place, spared[0].place)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("met", [3, 6])
def test_of_a_period_in_which_only_one_rank_had_data_and_went_astray_nothing_is_left(mode: str, met: int) -> None:
    (strayed, _) = after_joins(Straying(mode, (3, met + 2, 3), {1: met + 2}))
    (stayed, _) = after_joins(Straying(mode, (3, met, 3), {}))
    assert same_bits(strayed[0].place, stayed[0].place)
    assert len(strayed[0].others) == len(stayed[0].others)  # the optimizer is not that of the rank that began anew


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("most_skips", [0, 2])
def test_if_no_rank_is_sound_that_is_a_meeting_of_which_nothing_comes(most_skips: int, every: int) -> None:
    """Ranks keep what they have, and too many such meetings in a row, also of several joins, are an error."""
    straying = Straying(
        f"local:every={every}",
        counts=(1, 1, 1),
        strays=dict.fromkeys(range(3), 1),
        settings={"most_skips": most_skips},
        joins=4,
    )
    *before, last = after_joins(straying)
    assert len(before) == most_skips
    for ranks in before:
        assert not any(rank.error for rank in ranks)
        assert not any(same_bits(rank.place, ranks[0].place) for rank in ranks[1:])
    for rank in last:
        assert "no rank has parameters that are finite" in rank.error
        assert f"{most_skips + 1} meetings in a row" in rank.error


def test_the_last_meeting_may_be_one_that_a_codec_cannot_go_on_from() -> None:
    """Rank 1 goes so far twice that what is kept of the first way has no room beside the second."""
    far = 0.8 * torch.finfo(torch.float32).max / (9 * 3 * 16)

    def work(fabric: syncline.Fabric) -> tuple[Tensor, bool]:
        model = Line()
        optimizer = SGD(model.parameters(), lr=RATE)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="local:every=1", codec="topk:0.1")
        with sync.join():
            for _ in range((1, 2, 2)[fabric.rank]):
                optimizer.zero_grad()
                model(slope_of(fabric.rank)).backward()
                with torch.no_grad():
                    model.first += far if fabric.rank == 1 else 0.0
                optimizer.step()
            skipped = sync.driver.skipped
        return place_of(model), skipped

    ranks = syncline.run(work, 3, "threads", DEADLINES)
    assert [skipped for _, skipped in ranks] == [False, True, True]
    assert all(place.isfinite().all() and same_bits(place, ranks[0][0]) for place, _ in ranks)
