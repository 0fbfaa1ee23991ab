"""How long ranks train alone, and what they do when they meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from syncline.errors import ConfigError, UnknownName

OptimizerPolicy = Literal["keep", "average", "reset"]
POLICIES: tuple[OptimizerPolicy, ...] = ("keep", "average", "reset")


@dataclass(frozen=True, kw_only=True)
class Period:
    """When ranks meet, and how the model travels."""

    every: int
    growth: float = 1.0
    longest: int = 0
    fragments: int = 1
    delay: int = 0
    merge: float = 0.0

    def next(self, length: int) -> int:
        """The length of the period after one of this length."""
        grown = max(length, int(length * self.growth))
        return min(grown, self.longest) if self.longest else grown


def check_policy(policy: str) -> None:
    """Refuse what is not one."""
    if policy not in POLICIES:
        raise UnknownName("optimizer", policy, POLICIES)


def check_period(mode: str, every: int, warmup: int) -> None:
    """Refuse what cannot be counted."""
    if every < 1:
        raise ConfigError(f"every={every} is less than 1 step; try {mode}:every=8")
    if warmup < 0:
        raise ConfigError(f"warmup={warmup} is less than 0 steps; try {mode}:warmup=100")
