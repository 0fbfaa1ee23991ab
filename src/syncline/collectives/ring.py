"""Ring: each rank talks to two neighbours only, and every link carries the same.

    0 -> 1 -> 2 -> 3 -> 0      chunk c sets out from rank c, is added to at every stop, and is complete
                               one stop before where it began; then the finished chunks go round once more

Rounds 2(W-1), bytes sent per rank 2n(W-1)/W: the least possible. For large buffers and modest worlds; the
latency grows with W. The executor cuts every chunk into segments, so that a segment travels while the one
before it is being added.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from syncline.collectives.schedule import Action, Cost, Hosts, Round, Schedule, Transfer


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Reduce-scatter around the ring, then all-gather around the ring."""

    name: ClassVar[str] = "ring"

    def schedule(self, world: int, hosts: Hosts = ()) -> Schedule:
        """W chunks; in every round each rank sends one chunk to its right neighbour."""

        def around(number: int, shift: int, op: Action) -> Round:
            chunks = [(rank + shift - number) % world for rank in range(world)]
            return tuple(Transfer(r, (r + 1) % world, c, c + 1, op) for r, c in enumerate(chunks))

        adding = [around(number, 0, "add") for number in range(world - 1)]
        copying = [around(number, 1, "copy") for number in range(world - 1)]
        return Schedule(self.name, world, world, tuple(adding + copying))

    def closed_form(self, world: int, hosts: Hosts = ()) -> Cost:
        """2(W-1) rounds, 2(W-1)/W of the buffer."""
        return Cost(2 * (world - 1), Fraction(2 * (world - 1), world))
