"""Double binary tree: two trees, half of the buffer on each; who is a leaf in one is a parent in the other.

    W = 4     first tree  0 - 2 - (1, 3)        second tree  3 - 1 - (2, 0)

Rounds 2D + C - 1 with D = ceil(log2 W) and C pieces on each tree; no rank sends more than 2n. For large worlds:
the latency of a tree at twice its bandwidth, because no link is idle.

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from syncline.collectives.schedule import Cost, Hosts, Schedule
from syncline.collectives.tree import check_at_least
from syncline.collectives.trees import as_rounds, merged, up_and_down


@dataclass(frozen=True, kw_only=True)
class DoubleTree:
    """Two complementary binary trees, pipelined."""

    name: ClassVar[str] = "double-tree"

    pieces: int = 4  # pieces on each tree; more overlap better and cost one round each

    def __post_init__(self) -> None:
        check_at_least("pieces", self.pieces, 1)

    def schedule(self, world: int, hosts: Hosts = ()) -> Schedule:
        """The first half of the chunks on the first tree, the second half on the second."""
        first, second = two_trees(world)
        half = range(self.pieces), range(self.pieces, 2 * self.pieces)
        wave = merged([up_and_down(first, half[0]), up_and_down(second, half[1])])
        return Schedule(self.name, world, 2 * self.pieces, as_rounds(wave))

    def closed_form(self, world: int, hosts: Hosts = ()) -> Cost:
        """2 ceil(log2 W) + C - 1 rounds; a leaf here and a parent of two there sends n/2 + (n/2 + n)."""
        if world == 1:
            return Cost(0, Fraction(0))
        depth = (world - 1).bit_length()
        return Cost(2 * depth + self.pieces - 1, {2: Fraction(1), 3: Fraction(3, 2)}.get(world, Fraction(2)))


def two_trees(world: int) -> tuple[list[int], list[int]]:
    """The parents in each tree. The second is the first mirrored (W even) or shifted by one rank (W odd)."""
    first = [parent_in_first(rank, world) for rank in range(world)]
    second = [0] * world
    for rank, parent in enumerate(first):
        second[other(rank, world)] = other(parent, world) if parent >= 0 else -1
    return first, second


def parent_in_first(rank: int, world: int) -> int:
    """Clear the lowest bit and set the next one; where that rank does not exist, only clear it."""
    if rank == 0:
        return -1
    bit = rank & -rank
    parent = (rank ^ bit) | (bit << 1)
    return parent if parent < world else rank ^ bit


def other(rank: int, world: int) -> int:
    """Which rank stands in the second tree where `rank` stands in the first."""
    return (rank + 1) % world if world % 2 else world - 1 - rank
