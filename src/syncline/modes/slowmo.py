"""SlowMo: local SGD with a slow momentum over meetings.

    u = momentum * u + (anchor - mean) / learning rate
    anchor = anchor - lr * learning rate * u

With momentum 0 and lr 1 it is local SGD. Costs two copies of the parameters.

Paper: Wang et al., SlowMo: improving communication-efficient distributed SGD with slow momentum (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from syncline.errors import ConfigError
from syncline.modes.mode import Mode
from syncline.modes.outer import SlowMomentum
from syncline.modes.period import OptimizerPolicy, Period, check_period, check_policy
from syncline.modes.replica import Replica

if TYPE_CHECKING:
    from syncline.modes.periodic import PeriodicDriver


@dataclass(frozen=True)
class SlowMo(Mode):
    """Local SGD, and momentum over meetings."""

    name: ClassVar[str] = "slowmo"
    every: int = 8  # steps alone; more communicates less and drifts further
    momentum: float = 0.5  # of meetings; more remembers longer
    lr: float = 1.0  # how far to go where momentum points
    warmup: int = 0  # synchronous steps at the beginning
    optimizer: OptimizerPolicy = "keep"  # what becomes of its state when ranks meet: or "average", "reset"

    def __post_init__(self) -> None:
        check_period(self.name, self.every, self.warmup)
        check_policy(self.optimizer)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum} is not from 0 to below 1; try slowmo:momentum=0.5")
        if self.lr <= 0:
            raise ConfigError(f"lr={self.lr} is not positive; 1.0 goes as far as local SGD does")

    def start(self, replica: Replica) -> PeriodicDriver:
        from syncline.modes.periodic import PeriodicDriver

        outer = SlowMomentum(self.lr, self.momentum)
        return PeriodicDriver(replica, Period(every=self.every), outer, self.warmup, optimizer=self.optimizer)
