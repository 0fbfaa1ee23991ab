"""Hierarchical: add up inside each host, all-reduce across hosts, spread inside each host.

    host A: 0 1     reduce inside     0 and 2 hold the first half, 1 and 3 the second
    host B: 2 3     across hosts      0 <-> 2   1 <-> 3     every rank's link is busy with its own slice
                    spread inside

Any algorithm inside and any across. Every all-reduce here completes a chunk at one rank, its owner: the adding
half of the inner one brings chunk c to its owner in each host, the owners of c then run the outer one among
themselves, and the copying half of the inner one spreads the result. Hosts may differ in size: chunks are then
cut finely enough to fit all of them. Across hosts n/L travels per rank for L ranks on a host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from math import lcm
from typing import ClassVar

from syncline.collectives.flat import flat
from syncline.collectives.schedule import Action, Cost, Hosts, Round, Schedule, Transfer, hosts_of_sizes
from syncline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Hierarchical:
    """One algorithm inside hosts, another across them."""

    name: ClassVar[str] = "hierarchical"

    inner: str = "direct"  # algorithm inside a host
    outer: str = "ring"  # algorithm across hosts
    sizes: str = ""  # ranks on each host, as 2+3; empty: where the ranks really are

    def __post_init__(self) -> None:
        if self.name in (self.inner.partition(":")[0], self.outer.partition(":")[0]):
            raise ConfigError("hierarchical is made of two flat algorithms; give inner and outer one each")
        flat(self.inner)
        flat(self.outer)

    def schedule(self, world: int, hosts: Hosts = ()) -> Schedule:
        """Adding halves of the inner schedules, the outer one among owners, copying halves of the inner ones."""
        hosts = self.placed(world, hosts)
        inner = {size: flat(self.inner).schedule(size) for size in {len(host) for host in hosts}}
        outer = flat(self.outer).schedule(len(hosts))
        fine = lcm(*(schedule.chunks for schedule in inner.values()))
        scale = fine * outer.chunks
        adding = [moved(half(inner[len(host)], "add"), host, scale // inner[len(host)].chunks) for host in hosts]
        copying = [moved(half(inner[len(host)], "copy"), host, scale // inner[len(host)].chunks) for host in hosts]
        owners = [owners_in(inner[len(host)], host, fine) for host in hosts]
        across = [
            moved(outer.rounds, ranks, 1, first * outer.chunks, length) for first, length, ranks in stretches(owners)
        ]
        rounds = [*side_by_side(adding), *side_by_side(across), *side_by_side(copying)]
        return Schedule(self.name, world, scale, tuple(r for r in rounds if r))

    def closed_form(self, world: int, hosts: Hosts = ()) -> Cost | None:
        """With equal hosts of L ranks, each of which owns 1/L: rounds add up, and the outer bytes are over L."""
        hosts = self.placed(world, hosts)
        local = len(hosts[0])
        power_of_two = local & (local - 1) == 0
        if any(len(host) != local for host in hosts):
            return None
        if self.inner not in ("ring", "direct") and not (self.inner == "halving-doubling" and power_of_two):
            return None
        inner, outer = flat(self.inner).closed_form(local), flat(self.outer).closed_form(len(hosts))
        if inner is None or outer is None:
            return None
        return Cost(inner.rounds + outer.rounds, inner.sent + outer.sent / local)

    def placed(self, world: int, hosts: Hosts) -> Hosts:
        """The hosts that the setting names, or those given, or one for all."""
        if self.sizes:
            try:
                hosts = hosts_of_sizes([int(size) for size in self.sizes.split("+")])
            except ValueError:
                raise ConfigError(f"sizes={self.sizes!r} is not a sum of numbers; try sizes=2+2") from None
        hosts = hosts or hosts_of_sizes([world])
        if sorted(rank for host in hosts for rank in host) != list(range(world)) or not all(hosts):
            raise ConfigError(
                f"hosts {'+'.join(str(len(host)) for host in hosts)} do not hold ranks 0..{world - 1} once each"
            )
        return hosts


def half(schedule: Schedule, op: Action) -> list[Round]:
    """The rounds of a schedule with only its adding or only its copying transfers."""
    rounds = [tuple(t for t in transfers if t.op == op) for transfers in schedule.rounds]
    return [transfers for transfers in rounds if transfers]


def moved(rounds: Iterable[Round], ranks: Sequence[int], scale: int, first: int = 0, length: int = 1) -> list[Round]:
    """The same rounds among other ranks, with each chunk `scale * length` wide, from chunk `first` on."""
    width = scale * length
    return [
        tuple(Transfer(ranks[t.src], ranks[t.dst], first + t.lo * width, first + t.hi * width, t.op) for t in transfers)
        for transfers in rounds
    ]


def owners_in(schedule: Schedule, host: Sequence[int], fine: int) -> list[int]:
    """Which rank of the host completes each of `fine` chunks."""
    owner = [0] * schedule.chunks
    for transfers, carried in zip(schedule.rounds, schedule.carried, strict=True):
        for transfer, what in zip(transfers, carried, strict=True):
            if what.completes:
                owner[transfer.lo : transfer.hi] = [transfer.dst] * (transfer.hi - transfer.lo)
    width = fine // schedule.chunks
    return [host[owner[chunk // width]] for chunk in range(fine)]


def stretches(owners: Sequence[Sequence[int]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Neighbouring chunks with the same owner in every host: (first chunk, how many, the owners by host)."""
    found = []
    for ranks, chunks in groupby(enumerate(zip(*owners, strict=True)), key=lambda item: item[1]):
        numbers = [number for number, _ in chunks]
        found.append((numbers[0], len(numbers), ranks))
    return found


def side_by_side(parts: Iterable[Sequence[Round]]) -> list[Round]:
    """Several lists of rounds at the same time."""
    return [tuple(t for some in rounds for t in some) for rounds in zip_longest(*parts, fillvalue=())]
