"""One backward pass that ends with synchronized gradients."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from torch import Tensor

from syncline.core.passes import NO_DATA
from syncline.core.status import Call, PassStatus
from syncline.path.bucket import Slot
from syncline.path.work import PassWork


@dataclass(eq=False)
class Pass:
    """One backward pass of this rank, as far as it has come."""

    number: int
    synchronizes: bool  # whether gradients are sent in it
    since_step: int = 1  # passes since the last step, with this one; NO_DATA if it only takes part, or UNSURE
    late: bool = False  # made by the optimizer's step, because there was no backward pass, or none that synchronizes
    is_tainted: bool = False  # by a backward pass before it that failed and is part of the same step
    lags: bool = False  # it is waited for only in the next one
    failed: bool = False  # an exception ended it, so nobody may use it
    autograd_pass: int = -1  # the engine's number, which changes in nested ones
    next_bucket: int = 0
    produced: int = 0  # buckets that left with what they are for, and not only with zeros because it failed
    order: list[Slot] = field(default_factory=list)  # in which gradients came; only of the first pass
    unfrozen: list[str] = field(default_factory=list)  # parameters that had no bucket yet when the status left
    call: Call = Call.SYNCHRONIZE  # what this rank does in it
    has_ended: bool = False  # its status has left
    has_compared: bool = False  # with the others, what is unfrozen
    works: list[PassWork] = field(default_factory=list)  # under way: the buckets, and those of what was unfrozen
    loss_scale: float = 1.0  # of its gradients

    @property
    def has_data(self) -> bool:
        """False for a rank that only takes part so that the others can go on."""
        return self.since_step != NO_DATA

    @property
    def takes_part(self) -> bool:
        """Whether this rank sends gradients of its own, and is given the means."""
        return self.has_data and not self.failed

    @property
    def num_buckets(self) -> int:
        """How many buckets have left."""
        return sum(len(work.works) for work in self.works)

    def unused_names(self) -> set[str]:
        """Parameters that no rank had a gradient of."""
        return {name for work in self.works for name in work.unused_names()}


@dataclass(frozen=True)
class SavedPass:
    """A pass that was in flight when a checkpoint was made: its means, by parameter."""

    number: int
    status: PassStatus
    gradients: dict[str, Tensor]
    loss_scale: float

    @classmethod
    def of(cls, current: Pass, status: PassStatus) -> Self:
        """A copy of a pass that has arrived."""
        unused = current.unused_names()
        gradients: dict[str, Tensor] = {}
        for work in (work for several in current.works for work in several.works):
            for slot, view in zip(work.bucket.slots, work.buffer.views, strict=True):
                if slot.name not in unused:
                    gradients[slot.name] = view.clone()
        return cls(current.number, status, gradients, current.loss_scale)

    def state_dict(self) -> dict[str, Any]:
        """Nothing but numbers and tensors."""
        status = asdict(self.status)
        return {name: status[name] for name in ("failed", "nonfinite", "active")} | {
            "number": self.number,
            "gradients": dict(self.gradients),
            "loss_scale": self.loss_scale,
        }

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Self:
        """The pass that was saved."""
        status = PassStatus(saved["failed"], tuple(saved["nonfinite"]), tuple(saved["active"]))
        gradients = {name: gradient.clone() for name, gradient in saved["gradients"].items()}
        return cls(saved["number"], status, gradients, saved["loss_scale"])
