"""`syncline bench stragglers` and `syncline bench modes`: what the modes are for, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.bench.modes import METHODS, compare_modes_over
from syncline.bench.stragglers import MODES, SITUATIONS, Outcome, compare_modes
from syncline.cli.lists import known_entries, split_list
from syncline.cli.progress import counting
from syncline.cli.tables import JSON, data_of, marked, optional, print_json, show_table
from syncline.errors import ConfigError
from syncline.modes.registry import mode_of
from syncline.units import format_bytes

HTML = typer.Option(metavar="FILE", help="Where the plot goes.")


def stragglers(
    slow: Annotated[str, typer.Option(help=f"Who is slow: {', '.join(SITUATIONS)}.")] = ",".join(SITUATIONS),
    modes: Annotated[str, typer.Option(help="Separated by semicolons; the first is compared with.")] = ";".join(MODES),
    seconds: Annotated[float, typer.Option(help="That each mode trains.")] = 12.0,
    workers: Annotated[int, typer.Option(help="How many, each a process.")] = 4,
    html: Annotated[Path, HTML] = Path("bench-stragglers.html"),
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Workers of uneven speed: which modes wait for the slow one, and what that does to the loss.

    Four processes train a small GPT on the source of the standard library. A step is a real one and a sleep of 40 ms,
    which stands for the computation of a larger model, so that four workers fit on few cores; a slow step sleeps for
    120 ms. Every mode has the same slow steps and the same time, and is judged on text that nobody trains on.

    - `bursts`: any worker, for 2 to 4 steps now and then, a third of its steps. Bounded staleness is made for this.

    - `one`: always the same worker, for 10 to 20 steps now and then, a third of its steps. In the long run it sets the
      pace of everybody who is bounded by it: no bound helps, only `async` does.

    - `always`: one worker, all the time.

    `syncline bench stragglers --slow bursts --modes "sync;bounded:ahead=4" --seconds 10`
    """
    situations = known_entries(slow, "--slow", "situation", SITUATIONS)
    chosen = split_list(modes, "--modes", ";")
    for mode in chosen:
        mode_of(mode)
    if seconds <= 0 or workers < 2:
        raise ConfigError(f"--seconds {seconds} --workers {workers}: there must be some time and two workers at least")
    with counting(len(situations) * len(chosen)) as tell:
        outcomes = compare_modes(situations, chosen, seconds, workers, tell)
    if as_json:
        print_json([data_of(one) for one in outcomes])
        return
    for situation in situations:
        show_situation([one for one in outcomes if one.situation == situation])
    from syncline.bench.plot_modes import write_straggler_plot

    write_straggler_plot(outcomes, html)
    print(f"plot: {html}")


def show_situation(outcomes: list[Outcome]) -> None:
    """Print one situation."""
    first = outcomes[0]
    show_table(
        f"{first.situation}: {SITUATIONS[first.situation]}; {len(first.steps)} workers, {first.seconds:g} s each",
        outcomes,
        {
            "mode": lambda one: marked(one.mode, one.busy_elsewhere),
            "steps/s": lambda one: f"{one.steps_per_s:.1f}",
            f"× {first.mode}": lambda one: f"{one.steps_per_s / first.steps_per_s:.2f}",
            "slowest worker": lambda one: f"{min(one.steps) / one.seconds:.1f}",
            "staleness": lambda one: f"{one.staleness:.1f}",
            "loss": lambda one: f"{one.loss:.3f}",
            f"to the loss of {first.mode}": lambda one: optional("{:.1f} s", one.seconds_to(first.loss)),
        },
    )


def modes(
    rate: Annotated[str, typer.Option(help="Of the links, as tc writes it.")] = "100mbit",
    methods: Annotated[
        str, typer.Option(help="Modes, each with a codec after a space if wanted, separated by semicolons.")
    ] = ";".join(METHODS),
    steps: Annotated[int, typer.Option(help="Of each host; a multiple of 32 ends periods evenly.")] = 128,
    count: Annotated[int, typer.Option("--hosts", help="How many hosts are emulated.")] = 4,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Modes over a slow network: samples per second, the loss after the same samples, and how the link is used.

    Hosts are emulated with network namespaces (needs root and iproute2) and train a GPT of 5 M parameters. DDP makes a
    few steps for its speed; its loss is that of mode `sync` after as many samples as the others have, on fast links.
    The peak is what the busiest host sends in its fullest 100 ms, and 1 s, read from its network device.

    `syncline bench modes --steps 64 --methods "local:every=8;diloco:every=32 int8"`
    """
    chosen = split_list(methods, "--methods", ";")
    for method in chosen:
        mode_of(method.partition(" ")[0])
    if steps < 2 or count < 2:
        raise ConfigError(f"--steps {steps} --hosts {count}: there must be two hosts and two steps at least")
    with counting(len(chosen) + 2) as tell:
        rows = []
        for row in compare_modes_over(rate, chosen, steps, count, tell):
            rows.append(row)
            Console(stderr=True, highlight=False).print(
                f"{row.method}: {row.samples_per_s:.1f} samples/s, loss {row.loss:.3f}"
            )
    if as_json:
        print_json([data_of(row) for row in rows])
        return
    show_table(
        f"GPT of 5 M parameters, {count} hosts at {rate}, {steps} steps",
        rows,
        {
            "": lambda row: marked(row.method, row.busy_elsewhere),
            "samples/s": lambda row: f"{row.samples_per_s:.1f}",
            "× DDP": lambda row: f"{row.times_ddp:.1f}",
            "loss": lambda row: f"{row.loss:.3f}",
            "against sync": lambda row: f"{100 * row.more_loss:+.1f} %",
            "sent a step": lambda row: format_bytes(round(row.sent_bytes_per_step)),
            "peak, 100 ms": lambda row: f"{row.peak_100ms * 8 / 1e6:.0f} Mbit/s",
            "peak, 1 s": lambda row: f"{row.peak_1s * 8 / 1e6:.0f} Mbit/s",
        },
        "loss on text that nobody trained on; bytes per host",
    )
