"""A bar for commands that do one thing after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def counting(total: int) -> Iterator[Callable[[str], None]]:
    """A bar that moves when something new begins."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=total)

        def tell(what: str) -> None:
            begun = progress.tasks[0].description != "starting"
            progress.update(task, description=what, advance=1 if begun else 0)

        yield tell
