"""Training over a slow network: emulated hosts, a GPT, every method at every bucket size in the same run.

Ranks are started once a rate, and make a model for every cell of the grid. Cells take turns, a few at a time, always
together with DDP at its default bucket size, with which they are compared turn by turn. How many steps a turn has
depends on how long they take: one where a step takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from syncline.bench.contenders import DEFAULT_BUCKET_BYTES, Contender
from syncline.bench.metering import Meter, Metered, is_clean
from syncline.bench.notes import told_by_others, write_note
from syncline.bench.timing import median_ratio, most_of_ranks, take_turns
from syncline.bench.trainer import Trainer, Workload
from syncline.bench.workloads import gpt_workload, sgd
from syncline.fabric.base import Fabric
from syncline.lab.hosts import DEVICE, OnHosts, hosts
from syncline.lab.links import sent_by
from syncline.launch.processes import run_processes
from syncline.units import MIB

RATES = ("10gbit", "1gbit", "100mbit")
BUCKETS = (DEFAULT_BUCKET_BYTES, 4 * MIB, 2 * MIB, 1 * MIB)
METHODS: tuple[str, ...] = (
    "alone",
    "ddp",
    "ddp fp16",
    "ddp powersgd",
    "hook fp16",
    "hook topk:0.01",
    "hook int8",
    "syncline none",
    "syncline fp16",
    "syncline int8",
    "syncline onebit",
    "syncline topk:0.01",
    "syncline powersgd:4",
)
DDP = Contender("ddp")
LEAST_GAIN = 1.05  # of steps per second, for compression to pay; less is noise
WARM_UP = 3  # steps that are not counted; DDP makes new buckets after its first
TURNS = 3
TURN_S = 2.0  # of a turn's steps that count, about
LONG_STEP_S = 1.0  # from here on a cold cache makes no difference
AT_A_TIME = 8  # cells that take turns, besides DDP


@dataclass(frozen=True)
class NetworkRow:
    """One cell: a method with a bucket size at one rate."""

    rate: str
    method: str
    bucket_bytes: int | None  # None where there are no buckets, or one
    step_ms: float  # the median over turns, of the slowest rank
    ratio_to_ddp: float  # how many times faster than DDP at its default bucket size
    exposed_ms: float  # of the step, after the last gradient
    bytes_out_per_host: float  # in a step: all that a network device sent, headers and forwarding included
    message_bytes: float  # in a step: what a rank gave to collectives
    loss: float  # after as many steps with every method at this rate, the mean over ranks
    busy_elsewhere: float  # cores that other processes took, the mean over turns

    @property
    def clean(self) -> bool:
        """Whether others took so little that the figures can be believed."""
        return is_clean(self.busy_elsewhere)


class TurnFigures(NamedTuple):
    """What a turn showed, on the rank where it was most."""

    step_s: float
    exposed_s: float
    bytes_out: float  # in a step


def cells_of(methods: Iterable[str], buckets: Iterable[int]) -> list[Contender]:
    """DDP at its default, then every method at every bucket size, or once where that makes no difference."""
    cells = [
        Contender(method, size if Contender(method).has_buckets else DEFAULT_BUCKET_BYTES)
        for method in methods
        for size in buckets
    ]
    return list(dict.fromkeys([DDP, *cells]))


def compare_methods(
    rates: Sequence[str], cells: Sequence[Contender], steps: int, count: int, size: str, tell: Callable[[str], None]
) -> Iterator[list[NetworkRow]]:
    """All cells at one rate, then at the next. Ranks are started once a rate."""
    with hosts(count, rates[0]) as made, told_by_others(tell) as notes:
        for rate in rates:
            made.limit(rate)
            work = partial(measure_rate, rate=rate, cells=cells, steps=steps, size=size, meter=Meter(), notes=notes)
            yield run_processes(work, count, OnHosts())[0]


def measure_rate(
    fabric: Fabric, rate: str, cells: Sequence[Contender], steps: int, size: str, meter: Meter, notes: Path
) -> list[NetworkRow]:
    """On one rank: a few cells at a time take turns with DDP at its default bucket size."""
    workload = gpt_workload(size, 1, partial(sgd, rate=0.02))
    ddp = Replica(DDP, fabric, workload, steps)
    taken_by_ddp: list[Metered[TurnFigures]] = []
    rows = []
    others = [cell for cell in cells if cell != DDP]
    for start in range(0, max(len(others), 1), AT_A_TIME):
        few = others[start : start + AT_A_TIME]
        if fabric.rank == 0:
            write_note(notes, f"{rate}: cells {start + 1} to {start + len(few)} of {len(others)} take turns with DDP")
        replicas = {cell: Replica(cell, fabric, workload, steps, ddp.turn_steps) for cell in few}
        turns = {cell: replica.turn for cell, replica in ({DDP: ddp} | replicas).items()}
        taken = take_turns(fabric, turns, min(TURNS, steps), meter)
        taken_by_ddp += taken[DDP]
        for cell, replica in replicas.items():
            rows.append(row_of(rate, replica, taken[cell], taken[DDP], ddp.loss_step))
            replica.trainer.close()
    return [row_of(rate, ddp, taken_by_ddp, taken_by_ddp, ddp.loss_step), *rows]


class Replica:
    """One cell on one rank, warmed up."""

    def __init__(
        self, cell: Contender, fabric: Fabric, workload: Workload, steps: int, least_turn_steps: int = 0
    ) -> None:
        self.cell = cell
        self.trainer = Trainer(workload, cell, fabric, times_exposed=True)
        seconds, _ = self.trainer.timed_steps(WARM_UP)
        self.skipped, counted = turn_length(seconds[-1], steps)
        self.counted = max(counted, least_turn_steps - self.skipped)
        self.loss_step = WARM_UP + min(TURNS, steps) * self.turn_steps - 1  # if no turn is made again

    @property
    def turn_steps(self) -> int:
        """The steps of a turn, those that do not count included."""
        return self.skipped + self.counted

    def turn(self) -> TurnFigures:
        """Make the steps of a turn."""
        self.trainer.timed_steps(self.skipped)
        sent_before = sent_by(DEVICE)
        seconds, exposed = self.trainer.timed_steps(self.counted)
        sent = (sent_by(DEVICE) - sent_before) / self.counted
        return TurnFigures(median(seconds), median(exposed), most_of_ranks(self.trainer.fabric, [sent])[0])


def turn_length(step_s: float, steps: int) -> tuple[int, int]:
    """How many steps of a turn do not count, and how many do: `steps` in all turns, fewer where they are long.

    The first step finds in the caches what others have left there, which matters only where steps are short.
    """
    wanted = math.ceil(steps / min(TURNS, steps))
    return int(step_s < LONG_STEP_S), max(1, min(wanted, int(TURN_S / step_s)))


def row_of(
    rate: str,
    replica: Replica,
    taken: Sequence[Metered[TurnFigures]],
    by_ddp: Sequence[Metered[TurnFigures]],
    loss_step: int,
) -> NetworkRow:
    """One cell, compared turn by turn with DDP."""
    figures = [turn.value for turn in taken]
    return NetworkRow(
        rate=rate,
        method=replica.cell.name,
        bucket_bytes=replica.cell.bucket_bytes if replica.cell.has_buckets else None,
        step_ms=1e3 * median(turn.step_s for turn in figures),
        ratio_to_ddp=median_ratio([turn.value.step_s for turn in by_ddp], [turn.step_s for turn in figures]),
        exposed_ms=1e3 * median(turn.exposed_s for turn in figures),
        bytes_out_per_host=median(turn.bytes_out for turn in figures),
        message_bytes=replica.trainer.attached.message_bytes(),
        loss=replica.trainer.mean_loss(loss_step),
        busy_elsewhere=mean(turn.busy_elsewhere for turn in taken),
    )


# What compression is worth


def best_of(rows: Iterable[NetworkRow]) -> dict[str, NetworkRow]:
    """Every method at the bucket size with which it is fastest; rows are of one rate."""
    best: dict[str, NetworkRow] = {}
    for row in rows:
        if row.method not in best or row.step_ms < best[row.method].step_ms:
            best[row.method] = row
    return best


def pays(row: NetworkRow, best: dict[str, NetworkRow]) -> bool | None:
    """Whether compression makes steps faster than the same trainer has them without, each at its best bucket size.

    None if there is no compression, or nothing to compare it with.
    """
    dense = "syncline none" if row.method.startswith("syncline") else "ddp"
    if row.method in ("alone", dense) or dense not in best:
        return None
    return best[dense].step_ms / row.step_ms >= LEAST_GAIN


def verdict(rows: Sequence[NetworkRow]) -> str:
    """In words: which methods do not pay at the rate of these rows."""
    best, rate = best_of(rows), rows[0].rate
    judged = {method: pays(row, best) for method, row in best.items() if pays(row, best) is not None}
    losing = [method for method, it_pays in judged.items() if not it_pays]
    if not judged:
        return f"{rate}: there is no compression to judge, or nothing to compare it with"
    if not losing:
        return f"{rate}: all compression pays"
    if len(losing) == len(judged):
        return f"{rate}: no compression pays"
    return f"{rate}: compression does not pay with {', '.join(losing)}"
