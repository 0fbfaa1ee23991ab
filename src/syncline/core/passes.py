"""How many passes each rank has made since its last step, so that one that steps without the others is found out.

The number travels in the status of a pass. All ranks are equal until one has stepped and another has not; then
the first is in its first pass and the other in a later one, and all see it in that pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.core.ranks import some_ranks
from syncline.errors import Desync

NO_DATA = 0
UNSURE = -1  # of its count is a rank that has not stepped since a pass that nobody could use


def ranks_by_count(since_step: Sequence[int]) -> dict[int, list[int]]:
    """Ranks that are sure of their count; there is more than one if some have stepped between passes."""
    ranks: dict[int, list[int]] = {}
    for rank, count in enumerate(since_step):
        if count not in (NO_DATA, UNSURE):
            ranks.setdefault(count, []).append(rank)
    return ranks


class PassCounter:
    """Passes that this rank has made since its last step."""

    def __init__(self) -> None:
        self.count = 0  # passes with data since the last optimizer step
        self.is_sure = True  # that the others have stepped as often, which is not known after a pass that was no good

    def begin(self) -> None:
        """From here on all ranks count anew."""
        self.count = 0
        self.is_sure = True

    def next(self, has_data: bool) -> int:
        """The count of a pass, as the others are told."""
        self.count += has_data
        if not has_data:
            return NO_DATA
        return self.count if self.is_sure else UNSURE

    def compare(self, since_step: Sequence[int], is_good: bool, asks: bool) -> None:
        """Raise `Desync` on every rank if one has stepped since the pass before and another has not.

        A rank that `asks`, because it was not sure, takes the count of the others.
        """
        ranks = ranks_by_count(since_step)
        if len(ranks) > 1:
            raise Desync(desync_message(ranks))
        if ranks and asks:
            (self.count,) = ranks
        self.is_sure = is_good


def desync_message(ranks: dict[int, list[int]]) -> str:
    """What each rank did."""
    sides = [f"pass {count} since the last step of {some_ranks(who)}" for count, who in ranks.items()]
    return (
        f"ranks made different numbers of backward passes before a step, so this one was not used: it is "
        f"{', and '.join(sides)}. Some have stepped without the others, so replicas are not equal any more; close "
        f"this Sync and make another to begin from rank 0. Before a step all ranks must synchronize equally often: "
        f"wrap all backward passes but the last in sync.no_sync()"
    )
