"""Bounded staleness (SSP): as asynchronous SGD, but no worker is more than k steps ahead of the slowest.

    worker 0   step 1  step 2  step 3 ......waits      step 4
    worker 1   ─────── step 1 ───────────────── step 2 ──────      ahead=2

Short delays of one worker are not felt by the others; a worker that is always slow sets the pace in the end. With
`ahead=0` it is synchronous SGD: the commits of a step are averaged and applied as one.

Paper: Ho et al., More effective distributed ML via a stale synchronous parallel parameter server (2013).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from syncline.errors import ConfigError
from syncline.modes.asynchronous import AsyncSGD


@dataclass(frozen=True)
class BoundedStaleness(AsyncSGD):
    """Against parameter servers, with a bound."""

    name: ClassVar[str] = "bounded"
    ahead: int = 4  # steps that a worker may be ahead of the slowest; more waits less and is more stale

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ahead < 0:
            raise ConfigError(f"ahead={self.ahead} is less than 0 steps; 0 is synchronous, try bounded:ahead=4")

    @property
    def bound(self) -> float:
        return self.ahead
