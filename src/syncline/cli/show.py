"""`syncline show`: a collective's schedule as a picture, a drawing, JSON or a table of costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from syncline.collectives.draw import picture
from syncline.collectives.named import by_name, names
from syncline.collectives.registry import ALGORITHMS, schedule_of
from syncline.collectives.schedule import Hosts, Schedule, hosts_of_sizes
from syncline.collectives.svg import svg
from syncline.collectives.verify import verify
from syncline.errors import ConfigError
from syncline.units import format_bytes, parse_bytes

MOST_RANKS = 512  # beyond this a schedule has a million transfers


def show(
    algorithm: Annotated[
        str, typer.Argument(help=f"One of {', '.join(names())}; with settings as `tree:arity=4`.")
    ] = "",
    world: Annotated[int, typer.Option(help="How many ranks.")] = 4,
    hosts: Annotated[str, typer.Option(help="Ranks on each host, as `2+4`; for hierarchical.")] = "",
    root: Annotated[int, typer.Option(help="Where broadcast starts.")] = 0,
    svg_file: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write a drawing.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the transfers for programs.")] = False,
    cost: Annotated[
        str, typer.Option(metavar="SIZE", help="Compare what all algorithms send for a buffer of this size.")
    ] = "",
) -> None:
    """Draw who sends what to whom, round by round. Every schedule is verified before it is shown.

    `syncline show ring --world 6`

    `syncline show double-tree --world 8 --svg double-tree.svg`

    `syncline show hierarchical:inner=ring,outer=tree --world 6 --hosts 2+4`

    `syncline show --world 64 --cost 100MB`
    """
    if not 1 <= world <= MOST_RANKS:
        raise ConfigError(f"--world {world} is not between 1 and {MOST_RANKS}; try --world 8")
    placed = placed_hosts(world, hosts)
    nbytes = parse_bytes(cost) if cost else None
    schedule = by_name(algorithm, world, placed, root) if algorithm else None
    if schedule is None and nbytes is None:
        raise ConfigError(f"name an algorithm, or give --cost a size; algorithms: {', '.join(names())}")
    if schedule is not None:
        verify(schedule)
    if svg_file is not None:
        write_svg(svg_file, schedule)
    if as_json:
        print(json.dumps(as_data(schedule, world, placed, nbytes)))
        return
    console = Console(highlight=False)
    if schedule is not None and svg_file is None:
        console.print(picture(schedule))
    if nbytes is not None:
        console.print(cost_table(world, placed, nbytes))


def placed_hosts(world: int, text: str) -> Hosts:
    """The hosts that the option describes."""
    if not text:
        return ()
    try:
        sizes = [int(size) for size in text.split("+")]
    except ValueError:
        raise ConfigError(f"--hosts {text!r} is not a sum of numbers; try --hosts 2+2") from None
    if sum(sizes) != world or min(sizes) < 1:
        raise ConfigError(f"--hosts {text} adds up to {sum(sizes)}, not to --world {world}")
    return hosts_of_sizes(sizes)


def write_svg(path: Path, schedule: Schedule | None) -> None:
    """Write the drawing."""
    if schedule is None:
        raise ConfigError("--svg needs an algorithm to draw; try syncline show ring --svg ring.svg")
    try:
        path.write_text(svg(schedule), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    Console(stderr=True).print(f"wrote {path}")


def as_data(schedule: Schedule | None, world: int, hosts: Hosts, nbytes: int | None) -> dict[str, Any]:
    """The schedule, its costs, or both, for programs. All transfers of a round read the state before that round."""
    data: dict[str, Any] = {}
    if schedule is not None:
        data = {
            "algorithm": schedule.algorithm,
            "world": schedule.world,
            "chunks": schedule.chunks,
            "transfers": [{"round": number} | transfer._asdict() for number, transfer in schedule.transfers()],
        }
    if nbytes is not None:
        data["cost"] = [
            {"algorithm": name, "rounds": rounds, "bytes_sent_per_rank": sent, "bytes": nbytes}
            for name, rounds, sent in costs(world, hosts, nbytes)
        ]
    return data


def costs(world: int, hosts: Hosts, nbytes: int) -> list[tuple[str, int, int]]:
    """Rounds and most bytes sent by a rank, for every algorithm."""
    found = []
    for name in ALGORITHMS:
        cost = schedule_of(name, world, hosts).cost
        found.append((name, cost.rounds, round(cost.sent * nbytes)))
    return found


def cost_table(world: int, hosts: Hosts, nbytes: int) -> Table:
    """The costs side by side."""
    table = Table(title=f"{format_bytes(nbytes)} over {world} ranks", title_justify="left")
    table.add_column("algorithm")
    for heading in ("rounds", "most sent by a rank", "× the buffer"):
        table.add_column(heading, justify="right")
    for name, rounds, sent in costs(world, hosts, nbytes):
        table.add_row(name, str(rounds), format_bytes(sent), f"{sent / nbytes:.3f}" if nbytes else "-")
    return table
