"""Direct: every rank sends each slice straight to its owner, who adds and sends the sum back to all.

    round 0   all  -> owner of slice     adds in rank order 0..W-1
    round 1   owner of slice -> all      copies

Rounds 2, messages 2(W-1) per rank, bytes sent per rank 2n(W-1)/W. For small worlds, for shared memory and
for quantized values: a sum is rounded once, whatever W is, and its bits do not depend on who owns the slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from syncline.collectives.schedule import Cost, Hosts, Schedule, Transfer


@dataclass(frozen=True, kw_only=True)
class Direct:
    """Everyone sends each slice to its owner."""

    name: ClassVar[str] = "direct"

    def schedule(self, world: int, hosts: Hosts = ()) -> Schedule:
        """Peers are visited at growing distance, so that no rank is everyone's first target."""
        pairs = [(r, (r + distance) % world) for distance in range(1, world) for r in range(world)]
        adding = tuple(Transfer(src, dst, dst, dst + 1, "add") for src, dst in pairs)
        copying = tuple(Transfer(src, dst, src, src + 1, "copy") for src, dst in pairs)
        return Schedule(self.name, world, world, (adding, copying) if world > 1 else ())

    def closed_form(self, world: int, hosts: Hosts = ()) -> Cost:
        """Two rounds, 2(W-1)/W of the buffer."""
        return Cost(2 if world > 1 else 0, Fraction(2 * (world - 1), world))
