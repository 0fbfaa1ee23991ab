"""`python -m syncline.collectives.table FILE` writes docs/algorithms.md from the schedules themselves."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

from syncline.collectives.named import OTHERS, by_name, names
from syncline.collectives.registry import ALGORITHMS
from syncline.collectives.schedule import hosts_of_sizes

WORLDS = (2, 3, 4, 8, 13, 16, 64)
WHEN = {
    "ring": "large buffers, modest worlds",
    "halving-doubling": "medium buffers, worlds that are powers of two",
    "tree": "small buffers, large worlds",
    "double-tree": "large worlds",
    "direct": "small worlds, shared memory, quantized values",
    "hierarchical": "several ranks on each of several hosts",
    "reduce-scatter": "each rank needs a slice of the sum",
    "all-gather": "each rank needs everyone's part",
    "all-to-all": "each rank has a part for each other",
    "broadcast": "all ranks need what one has",
}
HEAD = """# Algorithms

Rounds, and the most that any rank sends as a multiple of the buffer n, counted from the schedules. This page is
written by `make docs`; a test sees that it is current. See one with `syncline show NAME --world W`.

For all-gather the buffer is the gathered result; for all-to-all it is what one rank has for all. Tree, double tree and
broadcast have four pieces in the pipeline (their default). Hierarchical is shown for two equal hosts, direct inside and
ring across, where W is even.

"""


def page() -> str:
    """The whole page."""
    heading = "| algorithm | use it for | " + " | ".join(f"W = {world}" for world in WORLDS) + " |"
    rule = "|---|---|" + "---|" * len(WORLDS)
    rows = [f"| `{name}` | {WHEN[name]} | " + " | ".join(cell(name, w) for w in WORLDS) + " |" for name in names()]
    return HEAD + "\n".join([heading, rule, *rows]) + "\n"


def cell(name: str, world: int) -> str:
    """`14 rounds, 1.75 n`"""
    hosts = hosts_of_sizes([world // 2] * 2) if name == "hierarchical" else ()
    if hosts and world % 2:
        return "–"
    rounds, sent = by_name(name, world, hosts).cost
    if name == "all-to-all":
        sent *= world
    return f"{rounds} rounds, {amount(sent)} n"


def amount(sent: Fraction) -> str:
    """A fraction, short."""
    return f"{float(sent):.3f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    assert set(WHEN) == {*ALGORITHMS, *OTHERS, "broadcast"}
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
