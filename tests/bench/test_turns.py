"""Who may run when."""

from __future__ import annotations

import itertools
import time

import syncline
from syncline.bench.turns import RANKS, give_word, is_referee, ranks_needed, turns_of

CONTENDERS, TURNS = 3, 6


def test_one_contender_runs_at_a_time_and_every_turn_has_an_order_of_its_own() -> None:
    ran: list[tuple[int, int, float, float]] = []  # contender, turn, from when to when

    def take_part(fabric: syncline.Fabric) -> None:
        if is_referee(fabric):
            give_word(fabric, TURNS)
            return
        for turn in turns_of(fabric, TURNS):
            began = time.monotonic()
            time.sleep(0.002)
            ran.append((fabric.rank // RANKS, turn, began, time.monotonic()))

    syncline.run(take_part, ranks=ranks_needed(CONTENDERS), fabric="threads")
    ran.sort(key=lambda one: one[2])
    pairs = [ran[at : at + RANKS] for at in range(0, len(ran), RANKS)]
    assert all(len({one[:2] for one in pair}) == 1 for pair in pairs)  # the ranks of a contender run together
    for before, after in itertools.pairwise(pairs):
        assert max(one[3] for one in before) <= min(one[2] for one in after)
    orders = [[pair[0][0] for pair in pairs if pair[0][1] == turn] for turn in range(TURNS)]
    assert all(sorted(order) == list(range(CONTENDERS)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
