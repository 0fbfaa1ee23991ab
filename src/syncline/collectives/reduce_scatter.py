"""Reduce-scatter: all-gather run backwards. Where a chunk was copied from a to b, b now adds it to a's.

Rounds ceil(log2 W), bytes sent per rank n(W-1)/W for a buffer of n bytes: the least possible of both, for
every world size.

Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024.
"""

from __future__ import annotations

from functools import lru_cache

from syncline.collectives.all_gather import closed_form, gathering
from syncline.collectives.schedule import Schedule, Transfer

__all__ = ["closed_form", "reduce_scatter"]


@lru_cache(maxsize=128)
def reduce_scatter(world: int) -> Schedule:
    """W chunks; rank r ends with the sum of everyone's chunk r."""
    rounds = tuple(
        tuple(Transfer(t.dst, t.src, t.lo, t.hi, "add") for t in transfers) for transfers in reversed(gathering(world))
    )
    return Schedule("dissemination", world, world, rounds, goal="reduce_scatter")
