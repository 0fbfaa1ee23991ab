"""How ranks are named in messages."""

from __future__ import annotations

from collections.abc import Sequence


def some_ranks(ranks: Sequence[int]) -> str:
    """`rank 2` or `ranks 0, 1, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
