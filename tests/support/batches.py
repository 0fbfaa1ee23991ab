"""The data of tests that train, and first weights: the same in every process, whoever draws them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

STEPS = 5
ROWS, INPUTS, HIDDEN, OUTPUTS, WORDS = 4, 6, 12, 3, 11


def generator_of(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(number * 1009**place for place, number in enumerate(numbers)))


@dataclass(frozen=True)
class Batch:
    """What one rank has for one step."""

    rank: int
    step: int

    @cached_property
    def x(self) -> Tensor:
        return torch.randn(ROWS, INPUTS, generator=generator_of(self.rank, self.step, 1), dtype=torch.float64)

    @cached_property
    def y(self) -> Tensor:
        return torch.randn(ROWS, OUTPUTS, generator=generator_of(self.rank, self.step, 2), dtype=torch.float64)

    @cached_property
    def words(self) -> Tensor:
        """More of them on higher ranks."""
        shape = (ROWS, 1 + self.rank)
        return torch.randint(WORDS, shape, generator=generator_of(self.rank, self.step, 3))

    @cached_property
    def image(self) -> Tensor:
        return torch.randn(ROWS, 3, 5, 5, generator=generator_of(self.rank, self.step, 4), dtype=torch.float64)


def fill(model: nn.Module, seed: int) -> nn.Module:
    """Weights from a generator of their own, because ranks that are threads share the global one."""
    generator = generator_of(seed, 77)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn / math.sqrt(max(parameter[:1].numel() if parameter.dim() else 1, 4)))
    return model
