"""Tree: sums flow up to rank 0, the result flows down, in pieces that follow one another.

            0                 arity 2: the children of r are 2r + 1 and 2r + 2
          /   \
         1     2              while piece 0 goes down, piece 1 still goes up
        / \\   /
       3   4 5

Rounds 2D + C - 1 for depth D and C pieces; a parent sends (k + 1) n, a leaf n. For small buffers in large
worlds, where the number of rounds is what counts. A larger arity is shallower but sends more from each parent.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from syncline.collectives.schedule import Cost, Hosts, Schedule
from syncline.collectives.trees import as_rounds, depths, heap, up_and_down
from syncline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A k-ary tree in level order, pipelined."""

    name: ClassVar[str] = "tree"

    arity: int = 2  # children per rank; more makes fewer rounds and more bytes from each parent
    pieces: int = 4  # pieces in the pipeline; more overlap better and cost one round each

    def __post_init__(self) -> None:
        check_at_least("arity", self.arity, 1)
        check_at_least("pieces", self.pieces, 1)

    def schedule(self, world: int, hosts: Hosts = ()) -> Schedule:
        """One chunk per piece; rank 0 completes all of them."""
        wave = up_and_down(heap(world, self.arity), range(self.pieces))
        return Schedule(self.name, world, self.pieces, as_rounds(wave))

    def closed_form(self, world: int, hosts: Hosts = ()) -> Cost:
        """2D + C - 1 rounds; the busiest rank has as many children as fit, and a parent unless it is the root."""
        if world == 1:
            return Cost(0, Fraction(0))
        depth = max(depths(heap(world, self.arity)))
        children_of_root = min(self.arity, world - 1)
        children_of_first = min(self.arity, max(0, world - 1 - self.arity))
        return Cost(2 * depth + self.pieces - 1, Fraction(max(children_of_root, 1 + children_of_first)))


def check_at_least(name: str, value: int, least: int) -> None:
    """Refuse a setting that is too small."""
    if value < least:
        raise ConfigError(f"{name}={value} is less than {least}; try {name}={least}")
