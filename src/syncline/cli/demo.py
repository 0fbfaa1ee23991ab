"""`syncline demo`: a schedule drawn, then run for real over four processes, and checked."""

from __future__ import annotations

import time
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


def demo() -> None:
    """Draw the ring, then run every algorithm over four local processes and check the answers."""
    console = Console(highlight=False)
    console.print(picture(schedule_of("ring", RANKS)))
    nbytes = format_bytes(4 * NUMEL)
    console.print(f"Now for real: {RANKS} processes, {nbytes} of gradients each, the mean over all of them.\n")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task("four processes are starting, meeting and adding")
        results = run(average, ranks=RANKS, fabric="torch")
    table = Table("algorithm", "rounds", "sent per rank", "time", "same bits", "right")
    for name in results[0]:
        times, digests, errors = zip(*(result[name] for result in results), strict=True)
        same, right = len(set(digests)) == 1, max(errors) < 1e-6
        cost = schedule_of(name, RANKS).cost if name in ALGORITHMS else None
        sent = format_bytes(float(cost.sent) * 4 * NUMEL) if cost else ""
        rounds = str(cost.rounds) if cost else ""
        table.add_row(name, rounds, sent, format_seconds(max(times)), mark(same), mark(right))
        if not (same and right):
            console.print(table)
            raise SynclineError(f"{name} gave a wrong answer: relative error {max(errors):.2g}, same bits: {same}")
    console.print(table)
    console.print("Next: syncline show double-tree --world 8   syncline bench   syncline doctor")


def mark(good: bool) -> str:
    """A tick or a cross."""
    return "[green]✓[/]" if good else "[red]✗[/]"


def average(fabric: Fabric) -> dict[str, tuple[float, int, float]]:
    """On one rank: for each algorithm the time, a digest of the result's bits, and its relative error."""
    everyone = [gradients(rank) for rank in range(fabric.world)]
    exact = torch.stack([gradient.double() for gradient in everyone]).mean(0)
    outcomes = {}
    for name in [*ALGORITHMS, "engine"]:
        bucket = fabric.buffer(NUMEL)
        bucket.copy_(everyone[fabric.rank])
        fabric.barrier()
        started = time.perf_counter()
        fabric.all_reduce(bucket, op="mean", collective=name)
        seconds = time.perf_counter() - started
        error = float((bucket.double() - exact).norm() / exact.norm())
        outcomes[name] = (seconds, crc32(bucket.numpy().tobytes()), error)
    return outcomes


def gradients(rank: int) -> torch.Tensor:
    """Different ones on every rank."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
