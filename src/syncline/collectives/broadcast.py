"""Broadcast: the way down of the tree, from any root, in pieces that follow one another.

Rounds D + C - 1 for depth D and C pieces; a parent sends 2n. Ranks are renumbered so that the root is first.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from syncline.collectives.schedule import Cost, Schedule, Transfer
from syncline.collectives.trees import as_rounds, depths, heap, wave_down

PIECES = 4  # in the pipeline, as in the tree


@lru_cache(maxsize=128)
def broadcast(world: int, root: int = 0) -> Schedule:
    """Everyone ends with the root's buffer."""
    rounds = tuple(
        tuple(Transfer((t.src + root) % world, (t.dst + root) % world, t.lo, t.hi, t.op) for t in transfers)
        for transfers in as_rounds(wave_down(heap(world, 2), range(PIECES), start=0))
    )
    return Schedule("tree", world, PIECES, rounds, goal="broadcast", root=root)


def closed_form(world: int) -> Cost:
    """D + C - 1 rounds; the root has at most two children."""
    if world == 1:
        return Cost(0, Fraction(0))
    return Cost(max(depths(heap(world, 2))) + PIECES - 1, Fraction(min(2, world - 1)))
