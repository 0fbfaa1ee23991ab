"""DiLoCo: ranks train alone for many steps; how far they have come is the gradient of an outer Nesterov optimizer.

    rank 0   step ... step ┐                          ┌ step ... step
    rank 1   step ... step ┘mean distance, outer step └ step ... step      every=100

Streaming: the model is cut into fragments that are exchanged in turn, and ranks go on training for `delay` steps while
a fragment travels, so that a link is used evenly and nobody waits. What a rank learned meanwhile is kept by `merge`.

    fragment 0   ......┌travels┐.....................
    fragment 1   ..............┌travels┐.............      every=100,fragments=4,delay=5,merge=0.5

Wire: the parameters in float32 every H steps, less with a codec, with error feedback. Memory: a copy of the parameters
in float32 (where ranks met last) and the outer momentum.

Paper: Douillard et al., DiLoCo (2023), and Streaming DiLoCo with overlapping communication (2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, ClassVar

from syncline.errors import ConfigError
from syncline.modes.mode import Mode
from syncline.modes.outer import Nesterov
from syncline.modes.period import Period, check_period
from syncline.modes.replica import Replica

if TYPE_CHECKING:
    from syncline.modes.periodic import PeriodicDriver


@dataclass(frozen=True)
class DiLoCo(Mode):
    """Many steps alone, then one of an outer optimizer."""

    name: ClassVar[str] = "diloco"
    every: int = 100  # steps between two exchanges of the same parameter; more communicates less
    lr: float = 0.7  # of the outer optimizer
    momentum: float = 0.9  # of the outer optimizer
    warmup: int = 0  # synchronous steps at the beginning
    fragments: int = 1  # parts of the model that are exchanged in turn; more use a link more evenly
    delay: int = 0  # steps that a fragment may travel; more hides a slower link
    merge: float = 0.0  # how much of what was learned during the delay is kept, of 1

    def __post_init__(self) -> None:
        check_period(self.name, self.every, self.warmup)
        if self.fragments < 1:
            raise ConfigError(f"fragments={self.fragments} is less than 1; try fragments=1, the whole model")
        if self.every % self.fragments:
            fitting = self.fragments * ceil(self.every / self.fragments)
            raise ConfigError(
                f"every={self.every} is not a multiple of fragments={self.fragments}; try every={fitting}"
            )
        turn = self.every // self.fragments
        if not 0 <= self.delay < turn:
            raise ConfigError(
                f"delay={self.delay} is not from 0 to below {turn} steps, which is every / fragments; "
                f"try delay={turn - 1}"
            )
        if not 0 <= self.merge <= 1:
            raise ConfigError(f"merge={self.merge} is not from 0 to 1; try 0.5")
        if self.lr <= 0:
            raise ConfigError(f"lr={self.lr} is not positive; try diloco:lr=0.7")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum} is not from 0 to below 1; try diloco:momentum=0.9")

    def start(self, replica: Replica) -> PeriodicDriver:
        from syncline.modes.periodic import PeriodicDriver

        period = Period(every=self.every, fragments=self.fragments, delay=self.delay, merge=self.merge)
        return PeriodicDriver(replica, period, Nesterov(self.lr, self.momentum), self.warmup)
