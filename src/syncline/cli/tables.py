"""Tables for people and rows for programs, made of the same figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from syncline.bench.metering import MOST_ELSEWHERE, is_clean

R = TypeVar("R")
JSON = typer.Option("--json", help="Print the figures for programs.")
DISTURBED = f"* other processes took more than {MOST_ELSEWHERE:g} of a core meanwhile, also when it was tried again"


def make_table(title: str, rows: Iterable[R], columns: Mapping[str, Callable[[R], object]], caption: str = "") -> Table:
    """A row for each, with what every column says of it; None is an empty cell. Where it is narrow, headings wrap."""
    table = Table(
        title=title, title_justify="left", caption=caption, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    cells = [["" if (said := cell(row)) is None else str(said) for cell in columns.values()] for row in rows]
    for number, heading in enumerate(columns):
        width = min(max(len(row[number]) for row in cells), 40)
        table.add_column(heading, justify="right" if number else "left", min_width=width, overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


def show_table(title: str, rows: Iterable[R], columns: Mapping[str, Callable[[R], object]], caption: str = "") -> None:
    """Print a table; below it, what the mark of figures means that were disturbed, if there are any."""
    rows = list(rows)
    if not all(is_clean(getattr(row, "busy_elsewhere", 0.0)) for row in rows):
        caption = f"{caption}\n{DISTURBED}".strip()
    Console(highlight=False).print(make_table(title, rows, columns, caption))


def marked(name: str, busy_elsewhere: float) -> str:
    """A name, with a mark if its figures were disturbed."""
    return name if is_clean(busy_elsewhere) else f"{name} *"


def data_of(row: Any) -> Any:
    """A row for programs: its fields and its properties; numbers that JSON does not have are null."""
    properties = [name for name, member in vars(type(row)).items() if isinstance(member, property)]
    return without_nan(asdict(row) | {name: getattr(row, name) for name in properties})


def without_nan(value: Any) -> Any:
    """The same with None for what is not finite."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: Any) -> None:
    """One line."""
    print(json.dumps(value), flush=True)


def optional(template: str, value: float | None) -> str:
    """A number in a format, or a dash if there is none."""
    return "-" if value is None else template.format(value)
