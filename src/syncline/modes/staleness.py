"""How old the parameters were that gradients were computed from, in updates by others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Staleness:
    """Of the updates of this worker."""

    counts: Mapping[int, int]  # updates by how stale they were

    @classmethod
    def of(cls, each: Sequence[int]) -> Staleness:
        """Count them."""
        return cls(dict(sorted(Counter(each).items())))

    @property
    def mean(self) -> float:
        """On average."""
        total = sum(self.counts.values())
        return sum(stale * count for stale, count in self.counts.items()) / total if total else 0.0

    @property
    def most(self) -> int:
        """The oldest."""
        return max(self.counts, default=0)

    def __str__(self) -> str:
        return f"{self.mean:.2f} updates by others on average, {self.most} at most"
