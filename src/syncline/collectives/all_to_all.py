"""All-to-all: everyone has a part for everyone; in round i each rank sends to the rank i places on.

Rounds W-1, bytes sent per rank n(W-1)/W for n bytes in: nothing is sent twice. Each round is a rotation, so every
rank sends one part and receives one part at a time. Chunk s * W + d is what rank s has for rank d.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from syncline.collectives.schedule import Cost, Schedule, Transfer


@lru_cache(maxsize=128)
def all_to_all(world: int) -> Schedule:
    """W * W chunks in all, of which rank s starts with row s and ends with column s."""
    rounds = tuple(
        tuple(part(rank, (rank + distance) % world, world) for rank in range(world)) for distance in range(1, world)
    )
    return Schedule("rotation", world, world * world, rounds, goal="all_to_all")


def part(src: int, dst: int, world: int) -> Transfer:
    """What `src` has for `dst`."""
    chunk = src * world + dst
    return Transfer(src, dst, chunk, chunk + 1, "copy")


def closed_form(world: int) -> Cost:
    """W-1 rounds; W-1 parts, as a share of the W * W chunks of all ranks together."""
    return Cost(world - 1, Fraction(world - 1, world * world))
