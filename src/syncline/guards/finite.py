"""Gradients that are not finite: all ranks skip the step together, and give up after too many in a row.

The mean over ranks has the same bits everywhere, and a NaN or an infinity on any rank is in it, so every rank comes to
the same verdict without asking. A sum that is finite has only finite terms: that is one fast pass over a bucket.

A gradient that is finite but huge is used, and moves parameters to where no gradient is finite any more. So when
gradients are not finite the parameters are looked at too, and what is said tells of the step that did the harm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.core.torch_internals import norm_of_each
from syncline.errors import NonFiniteGradient

log = logging.getLogger(__name__)
Policy = Literal["skip", "raise", "ignore"]
MOVED = (
    "an earlier step moved it there, with gradients that were finite but huge, so that steps which are skipped mend "
    "nothing. Load the last checkpoint, and clip gradients (clip_grad_norm_) or lower the learning rate"
)
POLICIES: tuple[Policy, ...] = ("skip", "raise", "ignore")
HUGE = 1e6  # no parameter is that large that was not moved there by mistake
SPARE = 16.0  # for momentum on top of what was not sent, random factors and the like


def is_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    if torch.isfinite(values.sum(dtype=wide)).item():
        return True
    return bool(torch.isfinite(values).all())


def sum_fits(values: Tensor, times: int) -> bool:
    """Whether all is finite, and stays so when a codec adds up any of the magnitudes, so many times over."""
    return magnitude_fits(largest_of(values), values.numel() * times, values.dtype) if values.numel() else True


def magnitude_fits(largest: float, times: float, dtype: torch.dtype = torch.float32) -> bool:
    """Whether so many values of this magnitude can be added up; not if it is infinite or NaN."""
    return largest * times * SPARE < torch.finfo(dtype).max


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str:
    """The name of the first tensor that has a NaN or an infinity; empty if none has."""
    everything = [(name, t.coalesce().values() if t.is_sparse else t) for name, t in named]
    plain = [tensor for _, tensor in everything if tensor.numel()]
    if not plain or torch.isfinite(torch.stack([norm.float() for norm in norm_of_each(plain)])).all():
        return ""
    return next((name for name, tensor in everything if not is_finite(tensor)), "")


def has_finite_gradients(optimizer: Optimizer) -> bool:
    """Whether all gradients that an optimizer would step with now are finite."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return not first_not_finite(("a gradient", one.grad) for one in parameters if one.grad is not None)


def harm_done(named: Iterable[tuple[str, Tensor]], is_mended: bool = False) -> str:
    """What earlier steps have made of parameters that are huge or not finite; empty if all are sound.

    Where nobody mends parameters that are not finite, as ranks do that take the mean of others, no step can be good any
    more: that is an error.
    """
    sizes = {name: (largest_of(tensor), tensor.dtype) for name, tensor in named if tensor.numel()}
    for name, (size, _) in sizes.items():
        if not math.isfinite(size):
            harm = f"{name} itself is not finite: {MOVED}"
            if is_mended:
                return harm
            raise NonFiniteGradient(f"no step is made, because none can be good any more: {harm}")
    name, (size, dtype) = max(sizes.items(), key=lambda one: one[1][0], default=("", (0.0, torch.float32)))
    if size > min(HUGE, torch.finfo(dtype).max / SPARE):
        return f"{name} itself is as large as {size:.3g}: {MOVED}"
    return ""


def largest_of(tensor: Tensor) -> float:
    """The largest magnitude in a tensor; NaN if there is one."""
    lowest, highest = torch.aminmax(tensor.detach())
    return float(torch.maximum(highest, -lowest))


class Skipping:
    """Counts the steps, or what else there is, that are skipped in a row."""

    def __init__(self, policy: Policy, most_in_a_row: int, what: str = "step") -> None:
        self.policy = policy
        self.most_in_a_row = most_in_a_row
        self.what = what
        self.in_a_row = 0

    def judge(self, reason: str, harm: str = "") -> bool:
        """Whether to skip it, given what is wrong with it, or nothing; `harm` is what earlier steps have done."""
        if not reason:
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        if self.policy == "raise" or self.in_a_row > self.most_in_a_row:
            raise NonFiniteGradient(
                f"{reason}; that makes {self.in_a_row} {self.what}s in a row. Nothing of it was used"
                + (f", but {harm}" if harm else ". Lower the learning rate, scale the loss, or look at the batch")
            )
        log.warning("%s: this %s is skipped (%d in a row)", reason, self.what, self.in_a_row)
        if harm and self.in_a_row == 1:
            log.warning("gradients may not be finite again: %s", harm)
        return True


class WithheldGradients:
    """Takes the gradients from an optimizer for the time of one step, which then changes nothing."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def withhold(self, parameters: Iterable[Tensor]) -> None:
        """Before the step."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.kept.append((parameter, parameter.grad))
                parameter.grad = None

    def give_back(self) -> None:
        """After it."""
        for parameter, gradient in self.kept:
            parameter.grad = gradient
        self.kept.clear()
