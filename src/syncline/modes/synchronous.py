"""Every rank steps with the mean gradient of this step.

    rank 0   forward  backward──┐mean┌ step   forward  backward──┐mean┌ step
    rank 1   forward  backward──┘    └ step   forward  backward──┘    └ step

Use it unless something speaks against it: it is one big batch, to rounding, and needs no other settings of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from syncline.modes.gradients import GradientDriver
from syncline.modes.mode import Mode
from syncline.modes.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Synchronous(Mode):
    """Every step, with this step's gradients."""

    name: ClassVar[str] = "sync"
    least_world: ClassVar[int] = 2

    def start(self, replica: Replica) -> GradientDriver:
        return GradientDriver(replica)
