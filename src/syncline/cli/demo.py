"""`syncline demo`: the same training twice, with PyTorch DDP over Gloo and with Syncline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.bench.side_by_side import METHODS, Record, Request, train_side_by_side
from syncline.cli.tables import JSON, data_of, print_json, show_table
from syncline.codecs.registry import codec_of
from syncline.collectives.registry import algorithm
from syncline.errors import ConfigError, UnknownName
from syncline.units import format_bytes, format_seconds
from syncline.workloads.gpt import SHAPES


def demo(
    workers: Annotated[int, typer.Option(help="Local ranks, one process each.")] = 2,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each training.")] = 40,
    size: Annotated[str, typer.Option(help=f"Of the GPT: {', '.join(SHAPES)} parameters.")] = "10M",
    batch: Annotated[int, typer.Option(help="Sequences of 64 bytes per rank and step.")] = 8,
    codec: Annotated[
        str, typer.Option(help="How much is said: `none`, `int8`, `topk:0.01`, `powersgd:4`, ...")
    ] = "none",
    collective: Annotated[str, typer.Option(help="Who sends what to whom: `auto`, `ring`, `tree`, ...")] = "auto",
    accumulate: Annotated[int, typer.Option(help="Backward passes per optimizer step.")] = 1,
    html: Annotated[Path, typer.Option(metavar="FILE", help="Where the report goes.")] = Path("syncline-demo.html"),
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Train a byte-level GPT on the text of Python's standard library, with DDP over Gloo and then with Syncline.

    Same seed, same batches, same number of steps: `syncline demo --workers 2 --steps 40`
    """
    if workers < 2 or steps < 4 or batch < 1 or accumulate < 1:
        raise ConfigError(
            f"--workers {workers} --steps {steps} --batch {batch} --accumulate {accumulate}: at least 2 workers, 4 "
            f"steps, a batch of 1 and 1 pass"
        )
    if size not in SHAPES:
        raise UnknownName("size", size, SHAPES)
    if collective != "auto":
        algorithm(collective)
    codec_of(codec)
    request = Request(workers, steps, size, batch, codec, collective, accumulate)
    console = Console(highlight=False)
    if not as_json:
        console.print(f"A GPT of {size} parameters learns Python's standard library, on {workers} processes.\n")
    records = train_side_by_side(request)
    if as_json:
        print_json({name: data_of(record) for name, record in records.items()})
        return
    show_records(records)
    from syncline.bench.report import write_report

    write_report(records, request, html)
    console.print(f"report: {html}")
    console.print("Next: the same as a script, examples/train_gpt.py   syncline bench train   syncline show ring")


def show_records(records: dict[str, Record]) -> None:
    """Print both trainings side by side."""
    first = next(iter(records.values()))
    rows: dict[str, Callable[[Record], str]] = {
        "step, median": lambda r: format_seconds(r.median_step_s),
        "exposed communication": lambda r: f"{format_seconds(r.median_exposed_s)} ({100 * r.exposed_share:.1f} %)",
        "gradients per step": lambda r: format_bytes(r.nbytes),
        "said per rank and step": lambda r: format_bytes(r.sent_bytes),
        "speed-up": lambda r: f"{first.median_step_s / r.median_step_s:.2f} x",
        "final loss": lambda r: f"{r.losses[-1]:.5f}",
        "cores that others took": lambda r: f"{r.busy_elsewhere:.2f}",
    }
    columns = {METHODS[name]: lambda row, record=record: row[1](record) for name, record in records.items()}
    show_table("", rows.items(), {"": lambda row: row[0]} | columns)
