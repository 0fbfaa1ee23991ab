"""`syncline bench network`: where compression pays, and where it does not, measured."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from syncline.bench.network import LEAST_GAIN, METHODS, RATES, NetworkRow, check_method, compare_methods, verdict
from syncline.errors import ConfigError, UnknownName
from syncline.units import format_bytes, format_seconds
from syncline.workloads.gpt import SHAPES


def network(
    rates: Annotated[str, typer.Option(help="Limits of the links, as tc writes them.")] = ",".join(RATES),
    methods: Annotated[
        str, typer.Option(help="DDP with one of its hooks or none, or `syncline` and a codec.")
    ] = ",".join(METHODS),
    steps: Annotated[int, typer.Option(help="Steps that are counted, of which the median is taken.")] = 8,
    count: Annotated[int, typer.Option("--hosts", help="How many hosts are emulated.")] = 4,
    size: Annotated[str, typer.Option(help=f"Of the GPT: {', '.join(SHAPES)} parameters.")] = "5M",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for programs.")] = False,
) -> None:
    """Training over a network, on hosts that are emulated with network namespaces (needs root and iproute2).

    Each method is compared with DDP over Gloo without a hook, and with the same trainer without compression: where its
    steps are not faster than those by 5 %, it does not pay. Hosts share the cores of this machine, so on fast links
    most of a step is computing. The loss is that of the last step, after as many steps with every method.

    `syncline bench network --rates 100mbit`

    `syncline bench network --rates 1gbit --methods "ddp,syncline none,syncline int4"`
    """
    if steps < 1 or count < 2:
        raise ConfigError(f"--steps {steps} --hosts {count}: there must be two hosts and one step at least")
    if size not in SHAPES:
        raise UnknownName("size", size, SHAPES)
    chosen = [method.strip() for method in methods.split(",")]
    for method in chosen:
        check_method(method)
    status = Console(stderr=True).status("making hosts", spinner="dots")
    console = Console(highlight=False)
    found: list[list[NetworkRow]] = []
    with status:
        for rows in compare_methods(rates.split(","), chosen, steps, count, size, status.update):
            found.append(rows)
            if not as_json:
                console.print(network_table(rows, f"GPT of {size} parameters, {count} hosts, links of {rows[0].rate}"))
    if as_json:
        print(json.dumps([row.as_data() for rows in found for row in rows]))
        return
    for rows in found:
        console.print(verdict(rows))


def network_table(rows: list[NetworkRow], title: str) -> Table:
    """One rate."""
    caption = (
        "ddp: PyTorch's, with its own hooks; the others are ours. Sent: by a host in a step. "
        f"Compression pays if steps are {LEAST_GAIN:g} times as fast as without it"
    )
    table = Table(title=title, title_justify="left", caption=caption)
    table.add_column("", no_wrap=True)
    for heading in ("steps/s", "exposed", "sent", "loss", "× DDP"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("compression", no_wrap=True)
    for row in rows:
        table.add_row(
            row.method.removeprefix("syncline "),
            f"{row.figures.steps_per_s:.3g}",
            format_seconds(row.figures.exposed_s),
            format_bytes(row.figures.sent_bytes),
            f"{row.figures.loss:.3f}",
            "" if row.times_ddp is None else f"{row.times_ddp:.2f}",
            {None: "", True: "pays", False: "does not pay"}[row.pays],
        )
    return table
