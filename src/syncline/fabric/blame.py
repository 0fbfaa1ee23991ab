"""Who is to blame when a wait fails: the rank at the end of the chain of waiting.

If 1 waits for 0, 0 for 3 and 3 for 2, and 2 waits for nobody, then 2 is the one. Every fabric has a board on which
ranks say whom they wait for; all that differs is where the board is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from syncline.errors import PeerAborted, PeerError, PeerLost, PeerStalled

Kind = Literal["lost", "stalled", "aborted"]


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
