"""Health: how far each rank is, why calls cannot be made any more, and who is to blame when a wait fails.

The culprit is the rank at the end of the chain of waiting: if 1 waits for 0, 0 for 3 and 3 for 2, and 2 waits for
nobody, then it is 2. Every fabric knows who waits for whom; all that differs is where that is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple

from syncline.errors import FabricError, PeerAborted, PeerError, PeerLost, PeerStalled

Kind = Literal["lost", "stalled", "aborted"]


class RankProgress(NamedTuple):
    """How far a rank is, by its own account."""

    step: int = 0  # that it is in
    sent: int = 0  # buckets of it that have left
    produced: int = 0  # buckets among these that have gradients in them
    doing: int = 0  # a `Doing` of guards/hangs.py


NO_PROGRESS = RankProgress()


class Health(ABC):
    """One rank's part in knowing how the others are."""

    failure: FabricError | None = None  # after which no call can be made

    @abstractmethod
    def publish(self, progress: RankProgress) -> None:
        """Say how far this rank is, where the others can read it at any time, also after it was killed or stopped."""

    @abstractmethod
    def progress_of(self, rank: int) -> RankProgress:
        """What a rank has published last; it may be a second old."""

    @abstractmethod
    def abort(self, why: str) -> None:
        """End what is under way, and all that comes, here and on the other ranks, who are told why."""


def culprit(first: int, waits_for: Callable[[int], int | None]) -> int:
    """Follow who waits for whom from `first` to a rank that waits for nobody."""
    seen = {first}
    rank = first
    while (following := waits_for(rank)) is not None and following not in seen:
        seen.add(following)
        rank = following
    return rank


def peer_error(kind: Kind, rank: int, observer: int, during: str, waited_s: float) -> PeerError:
    """The error that names the culprit."""
    where = f"during {during}; noticed by rank {observer} after {waited_s:.1f} s"
    if kind == "lost":
        return PeerLost(rank, f"rank {rank} is gone {where}. Look at what it printed last.")
    if kind == "aborted":
        return PeerAborted(rank, f"rank {rank} gave up {where}. Look at what it printed last.")
    return PeerStalled(
        rank,
        f"rank {rank} did not arrive before the deadline {where}. It may be stopped, in a long computation or in a "
        f"different branch; if it is only slow, give Deadlines a longer operation time.",
    )
