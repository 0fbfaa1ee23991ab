"""One rank's part of a schedule, in elements: what to send and receive, step by step.

Chunks are cut into segments, and a step is one segment of each of the rank's transfers in a round. Two steps are in
flight at once: while one segment is added, the next travels. What a step sends may not leave while a step before it
still changes it, and what it receives in place may not arrive while a step before it still reads or changes that
memory; `sends_after` and `receives_after` say how many steps must be complete. Receives are posted well ahead: a
message that finds its receive posted needs no round trip before it moves. Both ends of a transfer cut it alike and go
through rounds, segments and transfers in the same order, so the messages of a pair of ranks match by their order alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from syncline.collectives.schedule import Action, Carried, Schedule, Transfer, boundaries
from syncline.errors import ScheduleError


class Piece(NamedTuple):
    """Elements `lo` to `hi - 1` to or from `peer`."""

    peer: int
    lo: int
    hi: int
    op: Action
    whole: bool  # not a partial sum, so its own dtype can carry it
    completes: bool  # the receiver then holds every contribution


Pieces = tuple[Piece, ...]


class Step(NamedTuple):
    """Pieces that travel at the same time."""

    round: int
    sends: Pieces
    receives: Pieces
    receives_after: int  # steps that are complete before its receives are posted; never falls
    sends_after: int  # steps that are complete before its sends are posted; at least as many


Program = tuple[Step, ...]
SENDING = 2  # steps whose sends are under way
RECEIVING = 4  # steps ahead of the last complete one whose receives are posted


@lru_cache(maxsize=1024)
def compile_program(schedule: Schedule, rank: int, numel: int, segment: int, grain: int) -> Program:
    """The steps of `rank` for a buffer of `numel` elements, in segments of at most `segment` elements."""
    bounds = boundaries(numel, schedule.chunks, grain)
    steps: list[Step] = []
    for number, transfers in enumerate(schedule.rounds):
        mine = [
            (transfer, segments(transfer, what, bounds, segment))
            for transfer, what in zip(transfers, schedule.carried[number], strict=True)
            if rank in (transfer.src, transfer.dst)
        ]
        for part in range(max((len(cuts) for _, cuts in mine), default=0)):
            now = [(transfer, cuts[part]) for transfer, cuts in mine if part < len(cuts)]
            sends = tuple(piece._replace(peer=t.dst) for t, piece in now if t.src == rank)
            receives = tuple(piece._replace(peer=t.src) for t, piece in now if t.dst == rank)
            steps.append(Step(number, sends, receives, *what_comes_before(steps, sends, receives)))
    return tuple(steps)


def what_comes_before(steps: list[Step], sends: Pieces, receives: Pieces) -> tuple[int, int]:
    """How many steps must be complete before the receives of the next step are posted, and before its sends."""
    copies = tuple(piece for piece in receives if piece.op == "copy")
    receives_after = max(len(steps) - RECEIVING, steps[-1].receives_after if steps else 0, 0)
    for before in range(receives_after, len(steps)):
        if overlap(copies, (*steps[before].sends, *steps[before].receives)):
            receives_after = before + 1
    sends_after = max(len(steps) - SENDING + 1, receives_after, 0)
    for before in range(sends_after, len(steps)):
        if overlap(sends, steps[before].receives):
            sends_after = before + 1
    return receives_after, sends_after


def segments(transfer: Transfer, what: Carried, bounds: list[int], segment: int) -> list[Piece]:
    """A transfer cut into segments; empty for an empty chunk, on both ends alike."""
    lo, hi = bounds[transfer.lo], bounds[transfer.hi]
    return [
        Piece(-1, start, min(start + segment, hi), transfer.op, what.whole, what.completes)
        for start in range(lo, hi, segment)
    ]


def overlap(some: Pieces, others: Pieces) -> bool:
    """Whether any two pieces share an element."""
    return any(a.lo < b.hi and b.lo < a.hi for a in some for b in others)


def verify_matching(schedule: Schedule, numel: int, segment: int, grain: int) -> None:
    """Raise unless every send of every rank meets a receive of the same size, in the same order."""
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in range(schedule.world):
        for step in compile_program(schedule, rank, numel, segment, grain):
            for piece in step.sends:
                sent.setdefault((rank, piece.peer), []).append((piece.lo, piece.hi))
            for piece in step.receives:
                received.setdefault((piece.peer, rank), []).append((piece.lo, piece.hi))
    for pair in sent.keys() | received.keys():
        if sent.get(pair) != received.get(pair):
            raise ScheduleError(
                f"{schedule.algorithm} over {schedule.world} ranks: what {pair[0]} sends to {pair[1]} is not what "
                f"{pair[1]} receives: {sent.get(pair)} and {received.get(pair)}"
            )
