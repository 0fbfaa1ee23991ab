"""`syncline bench`: measure on this machine, against peers in the same run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.bench.algorithms import compare_algorithms
from syncline.bench.codecs import SEED, measure_codecs
from syncline.bench.collectives import MPIS, Results, compare
from syncline.bench.convergence import CODECS as CONVERGING
from syncline.bench.convergence import ConvergenceRow, compare_codecs
from syncline.bench.metering import is_clean
from syncline.bench.overhead import measure_overhead
from syncline.bench.peers import CONTENDERS, present
from syncline.bench.tasks import QUICK, TASKS
from syncline.bench.training import WEIGHED, StepTime, compare_training, peak_memory
from syncline.bench.workloads import WORKLOADS
from syncline.cli import bench_modes, bench_network
from syncline.cli.lists import known_entries
from syncline.cli.progress import counting
from syncline.cli.tables import DISTURBED, JSON, data_of, marked, optional, print_json, show_table
from syncline.codecs.registry import codec_of
from syncline.errors import ConfigError
from syncline.units import format_bytes, format_seconds, parse_bytes

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="markdown",
    help="Measure on this machine, against peers in the same run. Without a subcommand: everything.",
)
SIZES = "1KB,16KB,256KB,1MB,4MB,25MB,100MB"


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
    title = f"{ranks} processes take turns with {format_bytes(nbytes)}"
    with Console(stderr=True).status(title, spinner="dots"):
        measured = compare_algorithms(ranks, nbytes, repeats)
    if as_json:
        print_json({"ranks": ranks, "bytes": nbytes, "measured": [data_of(one) for one in measured]})
        return
    show_table(
        f"all-reduce of {format_bytes(nbytes)} over {ranks} processes, Gloo",
        sorted(measured, key=lambda one: one.median_s),
        {
            "algorithm": lambda one: marked(one.name, one.busy_elsewhere),
            "median": lambda one: format_seconds(one.median_s),
            "fastest": lambda one: format_seconds(one.fastest_s),
            "ratio to engine": lambda one: f"{one.ratio:.2f}",
        },
        "answers checked; medians; a ratio below 1 is faster",
    )


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
        rows = [data_of(one) for one in speeds]
        print_json({"bytes": parse_bytes(size), "world": world, "seed": seed, "codecs": rows})
        return
    show_table(
        f"one bucket of {format_bytes(parse_bytes(size))}, one core, {world} ranks, seed {seed}",
        speeds,
        {
            "codec": lambda one: marked(one.codec, one.busy_elsewhere),
            "native": lambda one: f"{one.encode_gb_s:.1f} {one.decode_gb_s:4.1f}",
            "torch": lambda one: f"{one.twin_encode_gb_s:.1f} {one.twin_decode_gb_s:4.1f}",
            "ratio": lambda one: f"{one.times_twin:.1f}",
            "bytes": lambda one: f"{one.positions} {one.wire_bytes_per_element:.3f}",
            "Gbit/s": lambda one: "never" if one.break_even_gbit_s <= 0 else f"{one.break_even_gbit_s:.1f}",
        },
        "GB/s of gradients, encoded and decoded; bytes sent of an element, and how positions are written. "
        "A codec pays on links slower than its Gbit/s",
    )
    from syncline.bench.plot import write_codec_plot

    write_codec_plot(speeds, html)
    print(f"plot: {html}")


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
    names = known_entries(workloads, "--workloads", "workload", TASKS)
    with counting(len(names) * len(dict.fromkeys(["none", *chosen])) * seeds) as tell:
        rows = compare_codecs(names, chosen, seeds, steps or None, ranks, tell, rate=rate or None)
    if as_json:
        print_json([data_of(row) for row in rows])
        return
    for title in dict.fromkeys(row.title for row in rows):
        show_convergence([row for row in rows if row.title == title])
    from syncline.bench.plot import write_convergence_plot

    write_convergence_plot(rows, html)
    print(f"plot: {html}")


def show_convergence(rows: list[ConvergenceRow]) -> None:
    """Print one workload."""
    first = rows[0]
    show_table(
        f"{first.title}: {first.ranks} ranks, {first.steps} steps, {first.seeds} seeds",
        rows,
        {
            "codec": lambda row: row.codec,
            "SGD momentum": lambda row: f"{row.momentum:g}",
            "bytes": lambda row: format_bytes(round(row.sent_bytes)),
            "× less": lambda row: f"{row.times_less:.1f}",
            "at the end": lambda row: format_bytes(round(row.end_sent_bytes)),
            "loss": lambda row: "diverged" if row.has_diverged else f"{row.loss:.3f}",
            "ratio": lambda row: "-" if row.has_diverged else f"{row.ratio:.3f}",
            "accuracy": lambda row: optional("{:.1%}", row.accuracy),
        },
        "bytes: sent by a rank in a step; loss: of unseen data, mean over seeds; ratio: to none",
    )


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

    They take turns of four steps, of which the first does not count. DDP is shown at its default bucket size and at
    the best of 25, 4, 2 and 1 MB.

    `syncline bench train --workloads "gpt;mlp"`
    """
    if repeats < 2:
        raise ConfigError(f"--repeats {repeats} is less than 2, and one turn says nothing about how much they differ")
    status = Console(stderr=True).status("starting", spinner="dots")
    with status:
        times: list[StepTime] = []
        for workload in known_entries(workloads, "--workloads", "workload", WORKLOADS, separator=";"):
            status.update(f"two ranks train: {workload}")
            times += compare_training(workload, repeats=repeats)
        status.update("peak memory")
        memory = {name: peak_memory(name) for name in WEIGHED}
        status.update("a world of one")
        overhead = measure_overhead()
    if as_json:
        print_json({"steps": [data_of(one) for one in times], "peak_bytes": memory, "overhead": data_of(overhead)})
        return
    for title in dict.fromkeys(one.workload for one in times):
        show_training(title, [one for one in times if one.workload == title])
    print("peak memory above the start: " + ", ".join(f"{name} {format_bytes(b)}" for name, b in memory.items()))
    print(
        f"400 small parameters, one rank: plain {format_seconds(overhead.plain_s)}, with Sync "
        f"{100 * overhead.alone:+.1f} %, with buckets all the same {100 * overhead.bucketed:+.1f} %"
    )


def show_training(title: str, times: list[StepTime]) -> None:
    """Print one workload."""
    show_table(
        f"{title}, 2 ranks",
        times,
        {
            "": lambda one: marked(one.contender, one.busy_elsewhere),
            "step": lambda one: format_seconds(one.median_s),
            "added": lambda one: f"{1e3 * one.added_s:.1f} ± {1e3 * one.added_error_s:.1f} ms" if one.added_s else None,
            "of the step": lambda one: f"{100 * one.added_share:.1f} %" if one.added_s else None,
            "× DDP": lambda one: f"{one.faster_than_ddp:.2f}",
            "guard": lambda one: f"{100 * one.guard_share:.2f} %" if one.guard_share else None,
        },
        "medians ± standard error; weights checked first; guard: of the step",
    )


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
    names = known_entries(contenders, "--contenders", "contender", CONTENDERS) if contenders else present()
    worlds = [int(number) for number in ranks.split(",")]
    with counting(len(names) * len(worlds)) as tell:
        results = compare(names, worlds, [parse_bytes(size) for size in sizes.split(",")], repeats, tell)
    if as_json:
        print_json(results.versions() | {"rows": [data_of(row) for row in results.rows]})
        return
    for world in results.worlds():
        show_world(results, world)
    from syncline.bench.plot import write_plot

    write_plot(results, html)
    print(f"plot: {html}")


def show_world(results: Results, ranks: int) -> None:
    """Print one world: the time of every contender, and how ours compares."""

    def seconds_with(name: str) -> Callable[[int], str]:
        return lambda nbytes: optional_seconds(results.seconds(name, ranks, nbytes))

    busy = {row.contender: row.busy_elsewhere for row in results.rows if row.ranks == ranks}
    show_table(
        f"all-reduce over {ranks} ranks",
        results.sizes(),
        {
            "size": format_bytes,
            **{marked(name, busy.get(name, 0.0)): seconds_with(name) for name in results.contenders()},
            "× gloo": lambda nbytes: optional("{:.1f}", results.times_faster(["gloo"], ranks, nbytes)),
            "× better MPI": lambda nbytes: optional("{:.1f}", results.times_faster(MPIS, ranks, nbytes)),
            "of the limit": lambda nbytes: optional("{:.0%}", results.times_faster(["limit"], ranks, nbytes)),
        },
        "" if all(map(is_clean, busy.values())) else DISTURBED,
    )


def optional_seconds(seconds: float | None) -> str:
    """A time, or a dash if there is none."""
    return "-" if seconds is None else format_seconds(seconds)
