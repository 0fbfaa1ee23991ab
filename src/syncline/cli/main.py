"""The command itself: what it is called with, and how errors look."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import syncline
from syncline.cli import bench, demo, doctor, show
from syncline.errors import SynclineError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="""Gradient synchronization for PyTorch: see it, measure it, make it cheaper.

Try:

* `syncline demo` : a GPT trained twice, with DDP over Gloo and with Syncline, side by side
* `syncline show ring --world 6` : who sends what to whom, round by round
* `syncline show --world 64 --cost 100MB` : every algorithm side by side
* `syncline bench` : all-reduce and training against DDP, Gloo and MPI, on this machine
* `syncline doctor` : what is installed and what is missing
""",
)
app.command("show")(show.show)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


def print_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        print(f"syncline {syncline.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the subcommand."""


def main() -> None:
    """Run the command; an error of ours is one line and exit code 2, never a traceback."""
    try:
        app()
    except SynclineError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
