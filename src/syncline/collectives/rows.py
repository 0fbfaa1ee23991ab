"""A schedule as the plain array that the native executor runs: one rank's rows of five numbers.

    opcode      a      b      c      meaning
    WAIT        peer   step          until that peer has signalled this step
    PULL_ADD    peer   lo     hi     own[lo:hi] = own op the peer's
    PULL_COPY   peer   lo     hi     own[lo:hi] = the peer's
    FOLD        lo     hi     mask   own[lo:hi] = the ranks in the mask, in order of rank
    FINISH      lo     hi            divide, if it is a mean
    SIGNAL      step                 tell the peers how far this rank has come

The receiver pulls straight from the sender's buffer, so nothing is sent; what is left of a message is the waiting: for
the sender to have what is read, and for earlier readers of what is overwritten. Every chunk is cut into cells of one
segment, and a rank counts a step for every cell it has changed. All ranks are walked through together, because whom to
wait for depends on what the others have done by then.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from syncline.collectives.schedule import Schedule, Transfer, boundaries

WAIT, PULL_ADD, PULL_COPY, FOLD, FINISH, SIGNAL = range(6)
Rows = npt.NDArray[np.int64]
Cell = tuple[int, int]  # elements lo to hi - 1


@dataclass
class Walker:
    """What is known of one rank while walking through the rounds."""

    rank: int
    steps: int = 0
    changed: dict[Cell, int] = field(default_factory=dict)  # the step in which it last changed a cell
    readers: dict[Cell, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))  # peer -> its step
    seen: dict[int, int] = field(default_factory=dict)  # the step of a peer that was waited for already
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def wait(self, peer: int, step: int) -> None:
        """Wait for a peer, unless that is known to be over."""
        if step > self.seen.get(peer, 0):
            self.seen[peer] = step
            self.rows.append((WAIT, peer, step, 0, 0))


@lru_cache(maxsize=256)
def compile_rows(schedule: Schedule, rank: int, numel: int, segment: int, grain: int) -> Rows:
    """The rows of `rank`, in cells of at most `segment` elements."""
    bounds = boundaries(numel, schedule.chunks, grain)
    walkers = [Walker(number) for number in range(schedule.world)]
    for number, transfers in enumerate(schedule.rounds):
        completes = {t: what.completes for t, what in zip(transfers, schedule.carried[number], strict=True)}
        pulls = cells_of_round(transfers, bounds, segment)
        for (dst, cell), sources in pulls.items():
            for transfer in sources:
                walkers[dst].wait(transfer.src, walkers[transfer.src].changed.get(cell, 0))
            for reader, step in walkers[dst].readers.pop(cell, {}).items():
                walkers[dst].wait(reader, step)
            emit(walkers[dst], cell, sources, completes[sources[0]])
        note_readers(walkers, pulls)
    return np.array(walkers[rank].rows, np.int64).reshape(-1, 5)


def cells_of_round(
    transfers: tuple[Transfer, ...], bounds: list[int], segment: int
) -> dict[tuple[int, Cell], list[Transfer]]:
    """For every rank and cell that changes in a round, where it comes from; first cells of all transfers first."""
    placed: list[tuple[int, int, Cell, Transfer]] = []
    for order, transfer in enumerate(transfers):
        cells = [
            (lo, min(lo + segment, bounds[chunk + 1]))
            for chunk in range(transfer.lo, transfer.hi)
            for lo in range(bounds[chunk], bounds[chunk + 1], segment)
        ]
        placed += [(position, order, cell, transfer) for position, cell in enumerate(cells)]
    pulls: dict[tuple[int, Cell], list[Transfer]] = defaultdict(list)
    for _, _, cell, transfer in sorted(placed, key=lambda item: item[:2]):
        pulls[transfer.dst, cell].append(transfer)
    return pulls


def emit(walker: Walker, cell: Cell, sources: list[Transfer], completes: bool) -> None:
    """Pull one cell, and say so."""
    if len(sources) > 1:
        mask = sum(1 << transfer.src for transfer in sources) | 1 << walker.rank
        walker.rows.append((FOLD, *cell, mask - (1 << 64) if mask >> 63 else mask, 0))
    else:
        opcode = PULL_ADD if sources[0].op == "add" else PULL_COPY
        walker.rows.append((opcode, sources[0].src, *cell, 0))
    if completes:
        walker.rows.append((FINISH, *cell, 0, 0))
    walker.steps += 1
    walker.changed[cell] = walker.steps
    walker.rows.append((SIGNAL, walker.steps, 0, 0, 0))


def note_readers(walkers: list[Walker], pulls: dict[tuple[int, Cell], list[Transfer]]) -> None:
    """Remember who read what: it may not be overwritten before the reader's step is over."""
    for (dst, cell), sources in pulls.items():
        for transfer in sources:
            walkers[transfer.src].readers[cell][dst] = walkers[dst].changed[cell]
