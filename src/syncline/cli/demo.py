"""`syncline demo`: a schedule drawn, then run for real over four processes, and checked."""

from __future__ import annotations

import time
from functools import partial
from zlib import crc32

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from syncline.collectives.draw import picture
from syncline.collectives.registry import ALGORITHMS, schedule_of
from syncline.errors import SynclineError
from syncline.fabric.base import Fabric
from syncline.launch import run
from syncline.units import format_bytes, format_seconds

RANKS = 4
NUMEL = 1_000_003
Outcome = tuple[float, int, float]  # seconds, a digest of the result's bits, its relative error


def demo() -> None:
    """Draw the ring, then run every algorithm over four local processes and check the answers."""
    console = Console(highlight=False)
    console.print(picture(schedule_of("ring", RANKS)))
    nbytes = format_bytes(4 * NUMEL)
    console.print(f"Now for real: {RANKS} processes, {nbytes} of gradients each, the mean over all of them.\n")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("four processes start, meet and add through shared memory")
        shared = run(partial(average, own="auto"), ranks=RANKS)
        progress.update(task, description="four processes start, meet and add over Gloo")
        gloo = run(partial(average, own="engine"), ranks=RANKS, fabric="torch")
    console.print(table_of(shared, gloo))
    console.print("All ranks have the same bits, and they are the right ones.")
    console.print("Next: syncline show double-tree --world 8   syncline bench   syncline doctor")


def table_of(shared: list[dict[str, Outcome]], gloo: list[dict[str, Outcome]]) -> Table:
    """What each algorithm sends, and how long it took on both fabrics. Answers are checked on the way."""
    table = Table("algorithm", "rounds", "sent per rank", "shared memory", "Gloo")
    for name in ALGORITHMS:
        cost = schedule_of(name, RANKS).cost
        sent = format_bytes(float(cost.sent) * 4 * NUMEL)
        table.add_row(name, str(cost.rounds), sent, checked(shared, name), checked(gloo, name))
    table.add_row("the fabric's own", "", "", checked(shared, "auto"), checked(gloo, "engine"))
    return table


def checked(results: list[dict[str, Outcome]], name: str) -> str:
    """The time of the slowest rank; an error if the answer is wrong on any."""
    seconds, digests, errors = zip(*(result[name] for result in results), strict=True)
    if len(set(digests)) > 1 or max(errors) > 1e-6:
        raise SynclineError(f"{name} gave a wrong answer: relative errors {errors}, digests {digests}")
    return format_seconds(max(seconds))


def average(fabric: Fabric, own: str) -> dict[str, Outcome]:
    """On one rank: what came of every algorithm, and of the fabric's own."""
    everyone = [gradients(rank) for rank in range(fabric.world)]
    exact = torch.stack([gradient.double() for gradient in everyone]).mean(0)
    bucket = fabric.buffer(NUMEL)
    outcomes = {}
    for name in 2 * [*ALGORITHMS, own]:  # the second time counts: the first one compiles the schedule
        bucket.copy_(everyone[fabric.rank])
        fabric.barrier()
        started = time.perf_counter()
        fabric.all_reduce(bucket, op="mean", collective=name)
        seconds = time.perf_counter() - started
        error = float((bucket.double() - exact).norm() / exact.norm())
        outcomes[name] = (seconds, crc32(bucket.numpy().tobytes()), error)
        fabric.barrier()
    return outcomes


def gradients(rank: int) -> torch.Tensor:
    """Different ones on every rank."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
