"""How many passes each rank has made since its last step, so that one that steps without the others is found out.

The number travels in the verdict of a pass and costs no message. All ranks are equal until one has stepped and another
has not; then the first is in its first turn and the other in a later one, and all see it in that pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import Desync
from syncline.fabric.agreement import some_ranks

NO_DATA = 0
UNSURE = -1  # of its turn is a rank that has not stepped since a pass that nobody could use
MOST_TURNS = 62  # that are told apart: the mean over ranks of such a number is exact enough in 16 bits


def ranks_by_turn(turns: Sequence[int]) -> dict[int, list[int]]:
    """Ranks that are sure of their turn; more than one turn if some have stepped between passes and others have not."""
    ranks: dict[int, list[int]] = {}
    for rank, turn in enumerate(turns):
        if turn not in (NO_DATA, UNSURE):
            ranks.setdefault(turn, []).append(rank)
    return ranks


class Turns:
    """Those of this rank."""

    def __init__(self) -> None:
        self.turn = 0  # passes with data since the last optimizer step
        self.is_sure = True  # that the others have stepped as often, which is not known after a pass that was no good

    def begin(self) -> None:
        """From here on all ranks count anew."""
        self.turn = 0
        self.is_sure = True

    def next(self, has_data: bool) -> int:
        """The turn of a pass, as the others are told."""
        self.turn += has_data
        if not has_data:
            return NO_DATA
        return min(self.turn, MOST_TURNS) if self.is_sure else UNSURE

    def compare(self, turns: Sequence[int], is_good: bool, asks: bool) -> None:
        """Raise `Desync` on every rank if one has stepped since the pass before and another has not.

        A rank that `asks`, because it was not sure, takes the word of the others.
        """
        ranks = ranks_by_turn(turns)
        if len(ranks) > 1:
            raise Desync(told_apart(ranks))
        if ranks and asks:
            (self.turn,) = ranks
        self.is_sure = is_good


def told_apart(ranks: dict[int, list[int]]) -> str:
    """What each rank did."""
    sides = [f"pass {turn} since the last step of {some_ranks(who)}" for turn, who in ranks.items()]
    return (
        f"ranks made different numbers of backward passes before a step, so this one was not used: it is "
        f"{', and '.join(sides)}. Some have stepped without the others, so replicas are not equal any more; close "
        f"this Sync and make another to begin from rank 0. Before a step all ranks must synchronize equally often: "
        f"wrap all backward passes but the last in sync.no_sync()"
    )
