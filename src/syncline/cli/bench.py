"""`syncline bench`: measure on this machine, against peers in the same run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from syncline.bench.algorithms import Measured, compare_algorithms
from syncline.errors import ConfigError
from syncline.units import format_bytes, format_seconds, parse_bytes

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="markdown",
    help="Measure on this machine, against peers in the same run. Without a subcommand: everything.",
)


@app.callback()
def everything(context: typer.Context) -> None:
    """Run all benchmarks when none is named."""
    if context.invoked_subcommand is None:
        algorithms()


@app.command()
def algorithms(
    ranks: Annotated[int, typer.Option(help="How many processes.")] = 4,
    size: Annotated[str, typer.Option(help="The buffer, as `25MB`.")] = "25MB",
    repeats: Annotated[int, typer.Option(help="Calls of each, of which the median is taken.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for programs.")] = False,
) -> None:
    """Our algorithms against the engine's own all-reduce, over Gloo on this machine.

    `syncline bench algorithms --ranks 4 --size 25MB`
    """
    if repeats < 1 or ranks < 2:
        raise ConfigError(f"--ranks {ranks} --repeats {repeats}: there must be two ranks and one repeat at least")
    nbytes = parse_bytes(size)
    console = Console(highlight=False)
    with console.status(f"{ranks} processes take turns with {format_bytes(nbytes)}", spinner="dots"):
        measured = compare_algorithms(ranks, nbytes, repeats)
    if as_json:
        print(json.dumps({"ranks": ranks, "bytes": nbytes, "measured": [asdict(one) for one in measured]}))
    else:
        console.print(table_of(measured, f"all-reduce of {format_bytes(nbytes)} over {ranks} processes, Gloo"))


def table_of(measured: list[Measured], title: str) -> Table:
    """Fastest first."""
    table = Table(title=title, title_justify="left", caption="answers checked; medians; a ratio below 1 is faster")
    table.add_column("algorithm")
    for heading in ("median", "fastest", "ratio to engine"):
        table.add_column(heading, justify="right")
    for one in sorted(measured, key=lambda one: one.median_s):
        table.add_row(one.name, format_seconds(one.median_s), format_seconds(one.fastest_s), f"{one.ratio:.2f}")
    return table
