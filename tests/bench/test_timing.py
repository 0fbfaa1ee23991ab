"""Who may run when, and what is made of the times."""

from __future__ import annotations

import time

import pytest
import torch

import syncline
from syncline.bench.metering import Meter
from syncline.bench.timing import error_of_median, median_ratio, most_of_ranks, seconds_of, take_turns

CONTENDERS, TURNS = 3, 6


def test_ranks_take_the_same_turns_and_every_turn_has_an_order_of_its_own() -> None:
    def take_part(fabric: syncline.Fabric) -> list[tuple[int, int]]:
        made: list[tuple[int, int]] = []
        contenders = {number: lambda number=number: made.append((number, len(made))) for number in range(CONTENDERS)}
        taken = take_turns(fabric, contenders, TURNS, Meter(), tries=1)
        assert [len(turns) for turns in taken.values()] == [TURNS] * CONTENDERS
        return made

    first, second = syncline.run(take_part, ranks=2, fabric="threads")
    assert first == second
    orders = [[number for number, _ in first[at : at + CONTENDERS]] for at in range(0, len(first), CONTENDERS)]
    assert all(sorted(order) == list(range(CONTENDERS)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_all_ranks_make_a_turn_again_that_was_disturbed() -> None:
    def take_part(fabric: syncline.Fabric) -> tuple[int, float]:
        made: list[int] = []

        class Disturbed(Meter):
            def run(self, work):
                work()
                return len(made), [0.9, 0.5, 0.0][len(made) - 1] if fabric.rank == 0 else 5.0

        (turn,) = take_turns(fabric, {"any": lambda: made.append(1)}, 1, Disturbed())["any"]
        return turn

    assert syncline.run(take_part, ranks=2, fabric="threads") == [(3, 0.0), (3, 0.0)]


def test_a_call_begins_together_and_is_over_when_the_slowest_rank_has_made_it() -> None:
    def work(fabric: syncline.Fabric) -> tuple[float, list[float]]:
        mine = seconds_of(fabric, lambda: time.sleep(0.05 * fabric.rank))
        return mine, most_of_ranks(fabric, [mine, float(fabric.rank)])

    (_, most), (slow, other) = syncline.run(work, ranks=2, fabric="threads")
    assert most == other == [slow, 1.0]


def test_contenders_are_compared_turn_by_turn() -> None:
    assert median_ratio([4.0, 22.0, 6.0], [2.0, 11.0, 3.0]) == 2.0


def test_the_error_of_a_median_is_how_much_medians_differ() -> None:
    draws = torch.randn(2000, 101, generator=torch.Generator().manual_seed(1))
    spread = float(draws.median(1).values.std())
    guessed = [error_of_median(draw.tolist()) for draw in draws]
    assert sum(guessed) / len(guessed) == pytest.approx(spread, rel=0.1)
