"""`syncline bench`: measure on this machine, against peers in the same run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from syncline.bench.algorithms import Measured, compare_algorithms
from syncline.bench.codecs import SEED, CodecSpeed, measure_codecs
from syncline.bench.collectives import MPIS, Results, compare
from syncline.bench.contenders import CONTENDERS, present
from syncline.bench.convergence import CODECS as CONVERGING
from syncline.bench.convergence import ConvergenceRow, compare_codecs
from syncline.bench.overhead import measure_overhead
from syncline.bench.tasks import QUICK, TASKS
from syncline.bench.training import WORKLOADS, Name, StepTime, compare_training, peak_memory
from syncline.cli import bench_modes, bench_network
from syncline.cli.progress import counting
from syncline.codecs.registry import codec_of
from syncline.errors import ConfigError, UnknownName
from syncline.units import format_bytes, format_seconds, parse_bytes

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="markdown",
    help="Measure on this machine, against peers in the same run. Without a subcommand: everything.",
)
SIZES = "1KB,16KB,256KB,1MB,4MB,25MB,100MB"
JSON = typer.Option("--json", help="Print the figures for programs.")


@app.callback()
def everything(context: typer.Context) -> None:
    """Run all benchmarks when none is named."""
    if context.invoked_subcommand is None:
        algorithms()
        collectives()
        codecs()
        train()


@app.command()
def algorithms(
    ranks: Annotated[int, typer.Option(help="How many processes.")] = 4,
    size: Annotated[str, typer.Option(help="The buffer, as `25MB`.")] = "25MB",
    repeats: Annotated[int, typer.Option(help="Calls of each, of which the median is taken.")] = 15,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Our algorithms against the engine's own all-reduce, over Gloo on this machine.

    `syncline bench algorithms --ranks 4 --size 25MB`
    """
    if repeats < 1 or ranks < 2:
        raise ConfigError(f"--ranks {ranks} --repeats {repeats}: there must be two ranks and one repeat at least")
    nbytes = parse_bytes(size)
    console = Console(highlight=False)
    status = Console(stderr=True).status(f"{ranks} processes take turns with {format_bytes(nbytes)}", spinner="dots")
    with status:
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


@app.command()
def codecs(
    size: Annotated[str, typer.Option(help="The bucket, as `25MB`.")] = "25MB",
    world: Annotated[int, typer.Option(help="Ranks, for the bytes on the wire.")] = 4,
    repeats: Annotated[int, typer.Option(help="Of which the median is taken.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the gradients, whose answers are compared with those of torch.")] = SEED,
    html: Annotated[Path, typer.Option(metavar="FILE", help="Where the plot goes.")] = Path("bench-codecs.html"),
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """How fast codecs are on one core, natively and in torch, and below which link speed each of them pays.

    `syncline bench codecs --size 25MB --world 4`
    """
    if repeats < 1 or world < 2:
        raise ConfigError(f"--world {world} --repeats {repeats}: there must be two ranks and one repeat at least")
    status = Console(stderr=True).status("starting", spinner="dots")
    with status:
        speeds = measure_codecs(parse_bytes(size), world, repeats, lambda name: status.update(name), seed)
    if as_json:
        rows = [asdict(one) for one in speeds]
        print(json.dumps({"bytes": parse_bytes(size), "world": world, "seed": seed, "codecs": rows}))
        return
    console = Console(highlight=False)
    title = f"one bucket of {format_bytes(parse_bytes(size))}, one core, {world} ranks, seed {seed}"
    console.print(codec_table(speeds, title))
    from syncline.bench.plot import write_codec_plot

    write_codec_plot(speeds, html)
    console.print(f"plot: {html}")


def codec_table(speeds: list[CodecSpeed], title: str) -> Table:
    """Fastest first."""
    caption = (
        "GB/s of gradients, encoded and decoded; bytes sent of an element, and how positions are written. "
        "A codec pays on links slower than its Gbit/s"
    )
    table = Table(title=title, title_justify="left", caption=caption, box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("codec", no_wrap=True)
    for heading in ("native", "torch", "ratio", "bytes", "Gbit/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in speeds:
        table.add_row(
            one.codec,
            f"{one.encode_gb_s:.1f} {one.decode_gb_s:4.1f}",
            f"{one.twin_encode_gb_s:.1f} {one.twin_decode_gb_s:4.1f}",
            f"{one.times_twin:.1f}",
            f"{one.positions} {one.wire_bytes_per_element:.3f}",
            "never" if one.break_even_gbit_s <= 0 else f"{one.break_even_gbit_s:.1f}",
        )
    return table


@app.command()
def convergence(
    codecs: Annotated[str, typer.Option(help="Each as `Sync` takes it, separated by spaces.")] = " ".join(CONVERGING),
    workloads: Annotated[str, typer.Option(help=f"Of {', '.join(TASKS)}.")] = ",".join(QUICK),
    seeds: Annotated[int, typer.Option(help="Trainings of each, of which the mean is taken.")] = 3,
    steps: Annotated[int, typer.Option(help="Of each training; 0 is what the workload has.")] = 0,
    rate: Annotated[float, typer.Option(help="The highest learning rate; 0 is what the workload has.")] = 0.0,
    ranks: Annotated[int, typer.Option(help="Each with its own data.")] = 4,
    html: Annotated[Path, typer.Option(metavar="FILE", help="Where the plot goes.")] = Path("bench-convergence.html"),
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """What codecs do to learning: small trainings with each of them, against dense at equal steps.

    A GPT on the text of Python's standard library, and a classifier of handwritten digits (needs scikit-learn). Losses
    are of data that no rank has trained on. A ratio of 1.05 is a loss 5 % above that of dense.

    All of it, some minutes: `syncline bench convergence`

    The GPT of the demo, 10 M parameters, an hour: `syncline bench convergence --workloads demo`

    One question: `syncline bench convergence --workloads digits --codecs "topk:0.01 topk:0.1"`

    At another learning rate: `syncline bench convergence --workloads gpt --codecs onebit --rate 0.02`
    """
    if seeds < 1 or steps < 0 or ranks < 2 or rate < 0:
        raise ConfigError(
            f"--seeds {seeds} --steps {steps} --ranks {ranks} --rate {rate}: one seed and two ranks at least, no less "
            "than 0 steps and rate"
        )
    chosen = codecs.split()
    for codec in chosen:
        codec_of(codec)
    names = [name.strip() for name in workloads.split(",")]
    for name in names:
        if name not in TASKS:
            raise UnknownName("workload", name, TASKS)
    with counting(len(names) * len(dict.fromkeys(["none", *chosen])) * seeds) as tell:
        rows = compare_codecs(names, chosen, seeds, steps or None, ranks, tell, rate=rate or None)
    if as_json:
        print(json.dumps([row.as_data() for row in rows]))
        return
    console = Console(highlight=False)
    for title in dict.fromkeys(row.title for row in rows):
        console.print(convergence_table([row for row in rows if row.title == title]))
    from syncline.bench.plot import write_convergence_plot

    write_convergence_plot(rows, html)
    console.print(f"plot: {html}")


def convergence_table(rows: list[ConvergenceRow]) -> Table:
    """One workload."""
    first = rows[0]
    title = f"{first.title}: {first.ranks} ranks, {first.steps} steps, {first.seeds} seeds"
    caption = "bytes: sent by a rank in a step; loss: of unseen data, mean over seeds; ratio: to none"
    table = Table(title=title, title_justify="left", caption=caption)
    table.add_column("codec", overflow="fold")
    table.add_column("SGD momentum", justify="right")
    for heading in ("bytes", "× less", "at the end", "loss", "ratio", "accuracy"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.codec,
            f"{row.momentum:g}",
            format_bytes(round(row.sent_bytes)),
            f"{row.times_less:.1f}",
            format_bytes(round(row.end_sent_bytes)),
            *(("diverged", "-") if row.has_diverged else (f"{row.loss:.3f}", f"{row.ratio:.3f}")),
            "-" if row.accuracy is None else f"{100 * row.accuracy:.1f} %",
        )
    return table


app.command()(bench_network.network)
app.command()(bench_modes.modes)
app.command()(bench_modes.stragglers)


@app.command()
def train(
    repeats: Annotated[int, typer.Option(help="Turns of each, of which the median is taken.")] = 15,
    workloads: Annotated[str, typer.Option(help=f"Of {'; '.join(WORKLOADS)}: separated by ;")] = ";".join(WORKLOADS),
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Training steps on two ranks: no synchronization, DDP over Gloo, and ours through shared memory and Gloo.

    Each has processes of its own, which take turns of four steps, of which the first does not count.

    `syncline bench train --workloads "gpt;mlp"`
    """
    if repeats < 2:
        raise ConfigError(f"--repeats {repeats} is less than 2, and one turn says nothing about how much they differ")
    chosen = [name.strip() for name in workloads.split(";")]
    for name in chosen:
        if name not in WORKLOADS:
            raise UnknownName("workload", name, WORKLOADS)
    status = Console(stderr=True).status("starting", spinner="dots")
    with status:
        times = []
        for workload in chosen:
            status.update(f"two ranks train: {workload}")
            times += compare_training(workload, repeats=repeats)
        status.update("peak memory")
        trained: tuple[Name, ...] = ("ddp", "syncline", "syncline over gloo", "syncline topk")
        memory = {name: peak_memory(name) for name in trained}
        status.update("a world of one")
        overhead = measure_overhead()
    if as_json:
        figures = {"steps": [asdict(one) for one in times], "peak_bytes": memory, "overhead": asdict(overhead)}
        print(json.dumps(figures))
        return
    console = Console(highlight=False)
    for title in dict.fromkeys(one.workload for one in times):
        console.print(training_table(title, [one for one in times if one.workload == title]))
    console.print("peak memory above the start: " + ", ".join(f"{n} {format_bytes(b)}" for n, b in memory.items()))
    console.print(
        f"400 small parameters, one rank: plain {format_seconds(overhead.plain_s)}, with Sync "
        f"{100 * overhead.alone:+.1f} %, with buckets all the same {100 * overhead.bucketed:+.1f} %"
    )


def training_table(title: str, times: list[StepTime]) -> Table:
    """One workload."""
    table = Table(
        title=f"{title}, 2 ranks", title_justify="left", caption="medians ± standard error; weights checked at the end"
    )
    table.add_column("")
    for heading in ("step", "added", "added, of the step", "× DDP", "guard, of the step"):
        table.add_column(heading, justify="right")
    for one in times:
        added = f"{1e3 * one.added_s:.1f} ± {1e3 * one.added_error_s:.1f} ms" if one.added_s else ""
        table.add_row(
            one.contender,
            format_seconds(one.median_s),
            added,
            f"{100 * one.added_share:.1f} %" if one.added_s else "",
            f"{one.faster_than_ddp:.2f}",
            f"{100 * one.guard_share:.2f} %" if one.guard_share else "",
        )
    return table


@app.command()
def collectives(
    ranks: Annotated[str, typer.Option(help="Numbers of processes.")] = "2,4,8",
    sizes: Annotated[str, typer.Option(help="Buffers.")] = SIZES,
    repeats: Annotated[int, typer.Option(help="Repeats of each, of which the median is taken.")] = 5,
    contenders: Annotated[str, typer.Option(help=f"Of {', '.join(CONTENDERS)}; all that are here if empty.")] = "",
    html: Annotated[Path, typer.Option(metavar="FILE", help="Where the plot goes.")] = Path("bench-collectives.html"),
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Shared memory against Gloo, Open MPI and MPICH, and against the machine's limit.

    `syncline bench collectives --ranks 2 --sizes 1KB,25MB`
    """
    names = [name.strip() for name in contenders.split(",")] if contenders else present()
    for name in names:
        if name not in CONTENDERS:
            raise UnknownName("contender", name, CONTENDERS)
    worlds = [int(number) for number in ranks.split(",")]
    console = Console(highlight=False)
    with counting(len(names) * len(worlds)) as tell:
        results = compare(names, worlds, [parse_bytes(size) for size in sizes.split(",")], repeats, tell)
    if as_json:
        print(json.dumps(results.as_data()))
        return
    for world in results.worlds():
        console.print(results_table(results, world))
    from syncline.bench.plot import write_plot

    write_plot(results, html)
    console.print(f"plot: {html}")


def results_table(results: Results, ranks: int) -> Table:
    """One world: the time of every contender, and how ours compares."""
    names = results.contenders()
    table = Table(title=f"all-reduce over {ranks} ranks", title_justify="left")
    table.add_column("size")
    for heading in [*names, "× gloo", "× better MPI", "of the limit"]:
        table.add_column(heading, justify="right")
    for nbytes in results.sizes():
        times = [results.seconds(name, ranks, nbytes) for name in names]
        limit = results.times_faster(["limit"], ranks, nbytes)
        table.add_row(
            format_bytes(nbytes),
            *("-" if seconds is None else format_seconds(seconds) for seconds in times),
            ratio(results.times_faster(["gloo"], ranks, nbytes)),
            ratio(results.times_faster(MPIS, ranks, nbytes)),
            "-" if limit is None else f"{100 * limit:.0f} %",
        )
    return table


def ratio(value: float | None) -> str:
    """`12.3`"""
    return "-" if value is None else f"{value:.1f}"
