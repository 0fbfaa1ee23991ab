"""A collective is data: rounds of transfers between ranks.

A buffer is cut into `chunks` equal chunks, numbered from 0. A transfer says that rank `src` gives its chunks
`lo` to `hi - 1` to rank `dst`, which adds them to its own or copies them over its own. All transfers of a
round read the state before that round. Where several ranks add into one chunk in one round, the operands, the
receiver's own among them, are added in ascending order of rank.

One schedule serves four readers: the executor runs it, the verifier proves it, the planner prices it and
`syncline show` draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

Action = Literal["add", "copy"]
Goal = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host


class Transfer(NamedTuple):
    """Chunks `lo` to `hi - 1` go from `src` to `dst`, to be added or copied."""

    src: int
    dst: int
    lo: int
    hi: int
    op: Action


Round = tuple[Transfer, ...]


class Cost(NamedTuple):
    """What a schedule costs: rounds, and the most any rank sends, as a multiple of the buffer."""

    rounds: int
    sent: Fraction


class Carried(NamedTuple):
    """What one transfer carries, known without running it."""

    whole: bool  # raw contributions or finished results: no partial sum in between
    completes: bool  # after this round the receiver holds every contribution


@dataclass(frozen=True, eq=False)
class Schedule:
    """Rounds of transfers that together reach `goal` over `world` ranks."""

    algorithm: str
    world: int
    chunks: int
    rounds: tuple[Round, ...]
    goal: Goal = "all_reduce"
    root: int = 0

    def transfers(self) -> Iterator[tuple[int, Transfer]]:
        """Every transfer with the number of its round."""
        for number, transfers in enumerate(self.rounds):
            for transfer in transfers:
                yield number, transfer

    @cached_property
    def cost(self) -> Cost:
        """Counted from the transfers."""
        sent = [0] * self.world
        for _, transfer in self.transfers():
            sent[transfer.src] += transfer.hi - transfer.lo
        return Cost(len(self.rounds), Fraction(max(sent, default=0), self.chunks))

    @cached_property
    def carried(self) -> tuple[tuple[Carried, ...], ...]:
        """For each round and each of its transfers, what it carries."""
        return tuple(carried_by_round(self))

    @property
    def complete(self) -> int:
        """How many contributions a finished chunk has."""
        return self.world if self.goal in ("all_reduce", "reduce_scatter") else 1

    def starts_with(self, rank: int, chunk: int) -> bool:
        """Whether `rank` has something of its own in `chunk` before the first round."""
        match self.goal:
            case "all_reduce" | "reduce_scatter":
                return True
            case "all_gather":
                return chunk == rank
            case "broadcast":
                return rank == self.root
            case "all_to_all":
                return chunk // self.world == rank


def contributions(schedule: Schedule) -> Iterator[list[list[int]]]:
    """How many contributions are in every chunk of every rank: at the start and after each round."""
    counts = [
        [int(schedule.starts_with(rank, chunk)) for chunk in range(schedule.chunks)] for rank in range(schedule.world)
    ]
    yield [list(row) for row in counts]
    for transfers in schedule.rounds:
        payloads = [counts[t.src][t.lo : t.hi] for t in transfers]
        for t, payload in zip(transfers, payloads, strict=True):
            for chunk, count in zip(range(t.lo, t.hi), payload, strict=True):
                counts[t.dst][chunk] = counts[t.dst][chunk] + count if t.op == "add" else count
        yield [list(row) for row in counts]


def carried_by_round(schedule: Schedule) -> Iterator[tuple[Carried, ...]]:
    """For each round, what its transfers carry."""
    whole = (1, schedule.complete)
    for transfers, (before, after) in zip(schedule.rounds, pairwise(contributions(schedule)), strict=True):
        yield tuple(
            Carried(
                whole=all(count in whole for count in before[t.src][t.lo : t.hi]),
                completes=t.op == "add" and all(count == whole[1] for count in after[t.dst][t.lo : t.hi]),
            )
            for t in transfers
        )


def world_of(hosts: Hosts) -> int:
    """How many ranks there are on all hosts together."""
    return sum(len(host) for host in hosts)


def hosts_of_sizes(sizes: Iterable[int]) -> Hosts:
    """Hosts with the given numbers of ranks, numbered host by host: `[2, 3]` is `((0, 1), (2, 3, 4))`."""
    hosts: list[tuple[int, ...]] = []
    first = 0
    for size in sizes:
        hosts.append(tuple(range(first, first + size)))
        first += size
    return tuple(hosts)


def boundaries(numel: int, chunks: int, grain: int = 1) -> list[int]:
    """Where each chunk starts, in elements, with the end of the last one appended.

    Chunks are equal but for rounding up to a multiple of `grain`; the last ones may be short or empty.
    """
    size = -(-numel // chunks)
    size = -(-size // grain) * grain
    return [min(chunk * size, numel) for chunk in range(chunks + 1)]


def runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Chunk numbers as half-open ranges of neighbours: `[3, 0, 1]` is `[(0, 2), (3, 4)]`."""
    ranges: list[tuple[int, int]] = []
    for chunk in sorted(chunks):
        if ranges and ranges[-1][1] == chunk:
            ranges[-1] = (ranges[-1][0], chunk + 1)
        else:
            ranges.append((chunk, chunk + 1))
    return ranges
