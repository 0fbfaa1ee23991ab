"""Recursive halving-doubling: exchange half with a partner, then a quarter, then an eighth, and back.

    W = 4     0 <-> 1   2 <-> 3      half of the buffer
              0 <-> 2   1 <-> 3      a quarter; now each rank owns a complete quarter
              0 <-> 2   1 <-> 3      and back, copying
              0 <-> 1   2 <-> 3

Rounds 2 log2 W, bytes sent per rank 2n(W-1)/W, for W a power of two. Otherwise the W - P ranks above the
largest power of two P fold in: they give their whole buffer to a partner first and get the result back last,
which costs two rounds, and their partners send n more. For medium sizes and for worlds that are powers of two.
Partners are near first, where most bytes go. Why fold-in and not binary blocks: docs/decisions/0003.

Rabenseifner, "Optimization of collective reduction operations", 2004.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from syncline.collectives.schedule import Cost, Hosts, Round, Schedule, Transfer


@dataclass(frozen=True, kw_only=True)
class HalvingDoubling:
    """Recursive vector halving with distance doubling, then the way back."""

    name: ClassVar[str] = "halving-doubling"

    def schedule(self, world: int, hosts: Hosts = ()) -> Schedule:
        """P chunks, P the largest power of two that is at most W."""
        power = largest_power(world)
        halving = [halve(power, level) for level in range(power.bit_length() - 1)]
        doubling = [tuple(back(transfer) for transfer in transfers) for transfers in reversed(halving)]
        extra = range(power, world)
        fold = tuple(Transfer(r, r - power, 0, power, "add") for r in extra)
        unfold = tuple(Transfer(r - power, r, 0, power, "copy") for r in extra)
        rounds = [fold, *halving, *doubling, unfold]
        return Schedule(self.name, world, power, tuple(r for r in rounds if r))

    def closed_form(self, world: int, hosts: Hosts = ()) -> Cost:
        """2 log2 P rounds and 2(P-1)/P of the buffer; two rounds and one buffer more when W > P."""
        power = largest_power(world)
        folded = int(world > power)
        rounds = 2 * (power.bit_length() - 1) + 2 * folded
        return Cost(rounds, Fraction(2 * (power - 1), power) + folded)


def halve(power: int, level: int) -> Round:
    """Each rank keeps the half of its window that its bit `level` names, and sends the other half."""
    size = power >> (level + 1)
    transfers = []
    for rank in range(power):
        partner = rank ^ (1 << level)
        lo = window(partner, level + 1, power)
        transfers.append(Transfer(rank, partner, lo, lo + size, "add"))
    return tuple(transfers)


def window(rank: int, levels: int, power: int) -> int:
    """The first chunk of the window `rank` has left after `levels` halvings."""
    return sum(power >> (level + 1) for level in range(levels) if rank >> level & 1)


def back(transfer: Transfer) -> Transfer:
    """The same chunks in the other direction, now finished."""
    return Transfer(transfer.dst, transfer.src, transfer.lo, transfer.hi, "copy")


def largest_power(world: int) -> int:
    """The largest power of two that is at most `world`."""
    return 1 << (world.bit_length() - 1)
