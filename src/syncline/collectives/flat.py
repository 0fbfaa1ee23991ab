"""The all-reduce algorithms that treat all ranks alike. A new one is a page beside these and a row here."""

from __future__ import annotations

from typing import Protocol

from syncline.collectives.direct import Direct
from syncline.collectives.double_tree import DoubleTree
from syncline.collectives.halving_doubling import HalvingDoubling
from syncline.collectives.ring import Ring
from syncline.collectives.schedule import Cost, Hosts, Schedule
from syncline.collectives.tree import Tree
from syncline.specs import parse


class Algorithm(Protocol):
    """Settings with a name and a schedule for every world."""

    @property
    def name(self) -> str:
        """What the user calls it."""

    def schedule(self, world: int, hosts: Hosts = ()) -> Schedule:
        """Who sends what to whom."""

    def closed_form(self, world: int, hosts: Hosts = ()) -> Cost | None:
        """What the schedule must cost, where a formula is known."""


FLAT: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm for algorithm in (Ring, HalvingDoubling, Tree, DoubleTree, Direct)
}


def flat(text: str) -> Algorithm:
    """The flat algorithm that `text` describes."""
    return parse("algorithm", text, FLAT)
