"""`syncline bench network`: where compression pays, and where it does not, measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from syncline.bench.contenders import DEFAULT_BUCKET_BYTES
from syncline.bench.network import (
    BUCKETS,
    LEAST_GAIN,
    METHODS,
    RATES,
    NetworkRow,
    best_of,
    cells_of,
    compare_methods,
    pays,
    verdict,
)
from syncline.cli.lists import list_buckets, list_rates, split_list
from syncline.cli.tables import JSON, data_of, marked, print_json, show_table
from syncline.errors import ConfigError, UnknownName
from syncline.units import MIB, format_bytes
from syncline.workloads.gpt import SHAPES

BUCKET_SIZES = ",".join(f"{nbytes // MIB}mb" for nbytes in BUCKETS)


def network(
    rates: Annotated[str, typer.Option(help="Limits of the links, as tc writes them.")] = ",".join(RATES),
    buckets: Annotated[
        str, typer.Option(help="Bucket sizes, as DDP counts them: 25mb is 25 * 2**20 bytes, and the default of all.")
    ] = BUCKET_SIZES,
    methods: Annotated[
        str, typer.Option(help="`alone`, `ddp`, `ddp` and a hook of torch's, `hook` or `syncline` and a codec.")
    ] = ",".join(METHODS),
    steps: Annotated[int, typer.Option(help="Steps that are counted; fewer where they take long.")] = 8,
    count: Annotated[int, typer.Option("--hosts", help="How many hosts are emulated.")] = 4,
    size: Annotated[str, typer.Option(help=f"Of the GPT: {', '.join(SHAPES)} parameters.")] = "5M",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Training over a network, on hosts that are emulated with network namespaces (needs root and iproute2).

    Each method is compared with DDP over Gloo at its default bucket size, and compression with the same trainer
    without it, each at its best bucket size: where steps are not faster by 5 %, it does not pay. `hook` is DDP with a
    small hook made of our kernels. torch's PowerSGD hook has one bucket: with several it dies over Gloo. `alone` does
    not synchronize, which is the limit. Hosts share the cores of this machine, so on fast links most of a step is
    computing. The loss is that of one step, the same with every method.

    With `--json` every cell is an object on a line of its own.

    `syncline bench network --rates 100mbit --buckets 25mb`

    `syncline bench network --rates 1gbit --methods "ddp,hook topk:0.01,syncline topk:0.01" --json`
    """
    if steps < 1 or count < 2:
        raise ConfigError(f"--steps {steps} --hosts {count}: there must be two hosts and one step at least")
    if size not in SHAPES:
        raise UnknownName("size", size, SHAPES)
    cells = cells_of(split_list(methods, "--methods"), list_buckets(buckets))
    status = Console(stderr=True).status("making hosts", spinner="dots")
    verdicts = []
    with status:
        for rows in compare_methods(list_rates(rates), cells, steps, count, size, status.update):
            if as_json:
                for row in rows:
                    print_json(data_of(row))
            else:
                show_rate(rows, f"GPT of {size} parameters, {count} hosts, links of {rows[0].rate}")
                verdicts.append(verdict(rows))
    for line in verdicts:
        Console(highlight=False).print(line)


def show_rate(rows: Sequence[NetworkRow], title: str) -> None:
    """Print one rate: every method at its default bucket size and at its best."""
    best = best_of(rows)
    usual = {row.method: row for row in rows if row.bucket_bytes in (None, DEFAULT_BUCKET_BYTES)}
    words = {None: "", True: "pays", False: "no"}

    def default(row: NetworkRow) -> NetworkRow:
        return usual.get(row.method, row)

    show_table(
        title,
        best.values(),
        {
            "": lambda row: marked(
                row.method.removeprefix("syncline "), max(row.busy_elsewhere, default(row).busy_elsewhere)
            ),
            "default\nms": lambda row: f"{default(row).step_ms:.0f}" if row.method in usual else None,
            "× DDP": lambda row: f"{default(row).ratio_to_ddp:.2f}" if row.method in usual else None,
            "best": lambda row: row.bucket_bytes and format_bucket(row.bucket_bytes),
            "step\nms": lambda row: f"{row.step_ms:.0f}",
            "× DDP ": lambda row: f"{row.ratio_to_ddp:.2f}",
            "sent": lambda row: format_bytes(row.bytes_out_per_host),
            "loss": lambda row: f"{row.loss:.3f}",
            "pays": lambda row: words[pays(row, best)],
        },
        "ddp, hook: PyTorch's DDP with torch's hooks and small ones; the others are ours. default, best: bucket "
        "sizes. × DDP: at its default. sent: by a host in a step, at the best. "
        f"Compression pays if steps are {LEAST_GAIN:g} times as fast as without it",
    )


def format_bucket(nbytes: int) -> str:
    """A bucket size as DDP counts it."""
    return f"{nbytes / MIB:g} MB"
