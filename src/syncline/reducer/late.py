"""Late means: those of a pass that has arrived, until the optimizers of their parameters step with them.

An optimizer that steps after a backward pass wants the gradients that its parameters had in it. When that pass arrives
they are late means, and its next step uses them, however many passes of other optimizers come before that. Gradients
that no step followed before the next pass were thrown away, as by `zero_grad()`, and nobody is given their means.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from syncline.core.torch_internals import multiply_each


@dataclass(eq=False)
class LateMeans:
    """Means of one pass, by parameter name, that no step has used yet."""

    number: int  # of the pass
    means: dict[str, Tensor]
    loss_scale: float = 1.0
    problem: str = ""  # because of which no step is made with them
    is_void: bool = False  # they mean nothing, so that what is wrong does not show in each
    is_in_buckets: bool = True  # in memory that another pass will write to
    is_shown: bool = False  # the loop was given them once
    is_replaced: bool = False  # by what is neither good nor bad to look at

    def drop(self, names: Iterable[str]) -> None:
        """Forget the means of these parameters."""
        for name in names:
            self.means.pop(name, None)

    def rescale(self, loss_scale: float) -> None:
        """Follow the scale of the loss."""
        if loss_scale != self.loss_scale and self.means:
            multiply_each(list(self.means.values()), loss_scale / self.loss_scale)
            self.loss_scale = loss_scale

    def leave_buckets(self, void: float) -> None:
        """Move to memory of their own.

        Means with a problem are `void` once they were shown. That is zero, because a loop that left out a step for
        what it saw in them would see it again in every pass, and never step. A GradScaler is yet to see it where
        another optimizer had its turn. The problem stays, and the step that it is for is skipped.
        """
        if self.is_in_buckets:
            self.is_in_buckets = False
            self.means = {name: mean.clone() for name, mean in self.means.items()}
        if self.problem and self.is_shown and not self.is_replaced:
            self.is_replaced = self.is_void = True
            self.means = {name: torch.full_like(mean, void) for name, mean in self.means.items()}

    def state_dict(self) -> dict[str, Any]:
        """Nothing but numbers, text and tensors, which do not change with the run."""
        return {
            "number": self.number,
            "means": {name: mean.clone() for name, mean in self.means.items()},
            "loss_scale": self.loss_scale,
            "problem": self.problem,
            "is_void": self.is_void,
            "is_shown": self.is_shown,
            "is_replaced": self.is_replaced,
        }

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Self:
        """The means that were saved; the next pass treats them as it would have done then."""
        return cls(**saved | {"means": {name: mean.clone() for name, mean in saved["means"].items()}})
