"""Every rank steps with the mean gradient of the step before, while its own gradients travel.

    rank 0   backward 1  step 0  forward  backward 2  step 1  forward  backward 3  step 2
             └────────── gradients 1 travel ────────┘└────────── gradients 2 travel ────┘

Nobody waits as long as a mean takes less time than a step. The price is a gradient that is one step old: the largest
stable learning rate on a quadratic is half of the synchronous one. In the first delayed step there is nothing to apply.
The last gradients are applied by `sync.drain()`, which evaluating the model and closing do by themselves.

A gradient is applied if the optimizer of its parameter stepped after its backward pass: what a loop throws away is not.

Memory: a second set of buckets, and a copy of gradients for loops that clip, unscale or zero them in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from syncline.errors import ConfigError
from syncline.guards.trainable import refuse_closures
from syncline.modes.gradients import GradientDriver
from syncline.modes.mode import Mode
from syncline.modes.replica import Replica


@dataclass(frozen=True)
class Delayed(Mode):
    """Every step, with the gradients of the step before."""

    name: ClassVar[str] = "delayed"
    warmup: int = 0  # synchronous steps before the first delayed one; more is safer while gradients change fast

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ConfigError(f"warmup={self.warmup} is less than 0 steps; try delayed:warmup=100")

    def start(self, replica: Replica) -> GradientDriver:
        refuse_closures(replica.optimizers, self.name)
        return GradientDriver(replica, lags_after=self.warmup)
