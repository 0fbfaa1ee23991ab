"""`python -m syncline.collectives.table FILE` writes docs/algorithms.md from the schedules themselves."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

from syncline.collectives.named import by_name, names
from syncline.collectives.schedule import hosts_of_sizes

WORLDS = (2, 3, 4, 8, 13, 16, 64)
ABOUT = {  # what it is for, and its closed form
    "ring": ("large buffers, modest worlds", "2(W-1) rounds, 2n(W-1)/W"),
    "halving-doubling": ("medium buffers, powers of two", "2 log₂ W rounds, 2n(W-1)/W; else 2 rounds and n more"),
    "tree": ("small buffers, large worlds", "2D + C - 1 rounds, (k+1) n, for depth D, C pieces, arity k"),
    "double-tree": ("large worlds", "2⌈log₂ W⌉ + C - 1 rounds, 2n, for C pieces on each tree"),
    "direct": ("small worlds, shared memory, quantized values", "2 rounds, 2n(W-1)/W"),
    "hierarchical": (
        "several ranks on several hosts",
        "rounds inside + across; bytes inside + across / L, for L a host",
    ),
    "reduce-scatter": ("a slice of the sum for each", "⌈log₂ W⌉ rounds, n(W-1)/W"),
    "all-gather": ("everyone's part for each", "⌈log₂ W⌉ rounds, n(W-1)/W"),
    "all-to-all": ("a part from each for each", "W-1 rounds, n(W-1)/W"),
    "broadcast": ("what one has for all", "D + C - 1 rounds, 2n, for depth D and C pieces"),
}
HEAD = """# Algorithms

What an algorithm takes: rounds, and the most that any rank sends, as a multiple of the buffer n. The closed form is
what it must be; the figures for each world W are counted from the schedules. This page is written by `make docs`, and
a test sees that it is current. See a schedule with `syncline show NAME --world W`.

For all-gather the buffer is the gathered result; for all-to-all it is what one rank has for all. Tree, double tree and
broadcast have four pieces in the pipeline (their default). Hierarchical is shown for two equal hosts, direct inside and
ring across, where W is even.

"""


def page() -> str:
    """The whole page."""
    heading = "| algorithm | use it for | closed form | " + " | ".join(f"W = {world}" for world in WORLDS) + " |"
    rule = "|---|---|---|" + "---|" * len(WORLDS)
    rows = [
        " | ".join([f"| `{name}`", *ABOUT[name], *(cell(name, w) for w in WORLDS), ""]).rstrip() for name in names()
    ]
    return HEAD + "\n".join([heading, rule, *rows]) + "\n"


def cell(name: str, world: int) -> str:
    """`14, 1.75 n`"""
    hosts = hosts_of_sizes([world // 2] * 2) if name == "hierarchical" else ()
    if hosts and world % 2:
        return "–"
    rounds, sent = by_name(name, world, hosts).cost
    if name == "all-to-all":
        sent *= world
    return f"{rounds}, {amount(sent)} n"


def amount(sent: Fraction) -> str:
    """A fraction, short."""
    return f"{float(sent):.3f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
