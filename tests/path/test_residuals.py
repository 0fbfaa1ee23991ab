"""A residual counts as a step of its own size, whether it is scaled parameter by parameter or known to fit as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from syncline.core.parts import Part
from syncline.path.residuals import GradientScale, Residual

CPU = torch.device("cpu")
PARTS = (Part("first", 0, 3, torch.Size([3])), Part("second", 3, 5, torch.Size([2])))
GRADIENT = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
LEFT = torch.tensor([8.0, 8.0, 8.0, 8.0, 8.0])


def scale_of(first: float, second: float) -> GradientScale:
    return GradientScale({"first": first, "second": second})


def made_at(scale: GradientScale, unused: tuple[str, ...] = ()) -> Residual:
    """A residual that two passes of this scale have left: the second one finds all as it was."""
    residual = Residual(PARTS, CPU)
    for _ in range(2):
        residual.next_values().copy_(LEFT)
        residual.commit(residual.next_values(), scale, unused)
    return residual


def sum_at(residual: Residual, scale: GradientScale) -> Tensor:
    out = torch.empty(5)
    residual.add_to(GRADIENT, scale, out)
    return out - GRADIENT


@pytest.mark.parametrize(("first", "second"), [(0.1, 0.2), (0.2, 0.2), (0.1, 0.4), (0.0, 0.2)])
def test_it_stands_for_the_same_step_at_every_scale(first: float, second: float) -> None:
    residual = made_at(scale_of(0.1, 0.2))
    wanted = torch.tensor([8 * 0.1 / first if first else 0.0] * 3 + [8 * 0.2 / second] * 2)
    assert torch.allclose(sum_at(residual, scale_of(first, second)), wanted)


def test_one_that_is_restored_is_of_the_scale_with_which_it_was_saved() -> None:
    residual = made_at(scale_of(0.1, 0.2))
    residual.restore("second", 0.4)
    assert torch.allclose(sum_at(residual, scale_of(0.1, 0.2)), torch.tensor([8.0, 8.0, 8.0, 16.0, 16.0]))


@pytest.mark.parametrize("grown", [1.0, 2.0, 4.0])
def test_a_parameter_that_nobody_used_keeps_its_own(grown: float) -> None:
    residual = made_at(scale_of(0.1, 0.2))
    residual.next_values().zero_()
    residual.commit(residual.next_values(), scale_of(0.1 * grown, 0.2 * grown), ["second"])
    assert sum_at(residual, scale_of(0.1 * grown, 0.2 * grown)).tolist() == [0.0, 0.0, 0.0, 8.0 / grown, 8.0 / grown]


def test_a_pass_with_a_learning_rate_of_zero_leaves_a_residual_as_it_is() -> None:
    residual = made_at(scale_of(0.1, 0.2))
    residual.next_values().zero_()
    residual.commit(residual.next_values(), scale_of(0.1, 0.0))
    assert sum_at(residual, scale_of(0.1, 0.2)).tolist() == [0.0, 0.0, 0.0, 8.0, 8.0]
