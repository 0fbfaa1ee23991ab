"""Local SGD: every rank trains alone for H steps, then all take the mean of their parameters.

    rank 0   step step step step ┐    ┌ step step step step ┐
    rank 1   step step step step ┘mean└ step step step step ┘        every=4

Communication is 1/H of the synchronous one. Ranks drift apart in between: the more their data differ and the larger H
is, the further from the optimum of all data they meet. Begin with synchronous steps (`warmup`), and let the period
grow while the learning rate falls (`growth`). With `within_hosts` the ranks of a host average gradients in every step,
and only hosts drift apart.

With a codec it is how far a rank has come that is encoded, with error feedback; that needs a copy of the parameters.

Paper: Stich, Local SGD converges fast and communicates little (2019); Lin et al., Don't use large mini-batches, use
local SGD (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from syncline.codecs.none import NoCodec
from syncline.errors import ConfigError
from syncline.modes.mode import Mode
from syncline.modes.outer import Follow
from syncline.modes.period import OptimizerPolicy, Period, check_period, check_policy
from syncline.modes.replica import Replica

if TYPE_CHECKING:
    from syncline.modes.periodic import PeriodicDriver


@dataclass(frozen=True)
class LocalSGD(Mode):
    """Parameters are averaged every so many steps."""

    name: ClassVar[str] = "local"
    least_world: ClassVar[int] = 2
    every: int = 8  # steps alone; more communicates less and drifts further
    warmup: int = 0  # synchronous steps at the beginning; more is safer while gradients change fast
    growth: float = 1.0  # each period is so much longer than the one before
    longest: int = 0  # steps that a period may grow to; 0 is without end
    within_hosts: bool = False  # average gradients inside a host in every step
    optimizer: OptimizerPolicy = "keep"  # what becomes of its state when ranks meet: or "average", "reset"

    def __post_init__(self) -> None:
        check_period(self.name, self.every, self.warmup)
        check_policy(self.optimizer)
        if self.growth < 1:
            raise ConfigError(f"growth={self.growth} is less than 1, but periods only grow; try local:growth=1.5")
        if self.longest and self.longest < self.every:
            raise ConfigError(f"longest={self.longest} is less than every={self.every}; try longest={self.every}")

    def start(self, replica: Replica) -> PeriodicDriver:
        from syncline.modes.periodic import PeriodicDriver

        period = Period(every=self.every, growth=self.growth, longest=self.longest)
        outer = None if isinstance(replica.settings.codec, NoCodec) else Follow()
        return PeriodicDriver(replica, period, outer, self.warmup, self.within_hosts, self.optimizer)
