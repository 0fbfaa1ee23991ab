"""All-gather by dissemination: everyone passes on what it has to a rank twice as far away each time.

    W = 5    round 0   r -> r + 1    1 chunk
             round 1   r -> r + 2    2 chunks
             round 2   r -> r + 4    the 1 that is left

Rounds ceil(log2 W), bytes sent per rank n(W-1)/W for a result of n bytes: the least possible of both, for
every world size. Chunks keep their place in the result, so nothing is rotated at the end.

Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from syncline.collectives.schedule import Cost, Round, Schedule, Transfer, runs


@lru_cache(maxsize=128)
def all_gather(world: int) -> Schedule:
    """W chunks; rank r starts with chunk r and ends with all."""
    return Schedule("dissemination", world, world, tuple(gathering(world)), goal="all_gather")


@lru_cache(maxsize=128)
def all_gather_at_once(world: int) -> Schedule:
    """One round of W-1 messages from every rank: for parts so small that only waking up costs anything."""
    pairs = [(rank, (rank + distance) % world) for distance in range(1, world) for rank in range(world)]
    transfers = tuple(Transfer(src, dst, src, src + 1, "copy") for src, dst in pairs)
    return Schedule("direct", world, world, (transfers,) if transfers else (), goal="all_gather")


def gathering(world: int) -> list[Round]:
    """After each round every rank holds its own chunk and those of the ranks before it, twice as many as before."""
    rounds: list[Round] = []
    have = 1
    while have < world:
        count = min(have, world - have)
        rounds.append(
            tuple(
                Transfer(rank, (rank + have) % world, lo, hi, "copy")
                for rank in range(world)
                for lo, hi in runs([(rank - back) % world for back in range(count)])
            )
        )
        have += count
    return rounds


def closed_form(world: int) -> Cost:
    """ceil(log2 W) rounds, (W-1)/W of the result."""
    return Cost((world - 1).bit_length(), Fraction(world - 1, world))
