"""A model whose gradients are known, in buckets that are small."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SMALL = {"bucket_bytes": 2000, "first_bucket_bytes": 500}


class Steep(nn.Module):
    """Its gradients are what it is given: the loss is a plain product."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(24, 20))
        self.vector = nn.Parameter(torch.zeros(37))
        self.other = nn.Parameter(torch.zeros(16, 12, 2))

    def forward(self, slopes: list[Tensor]) -> Tensor:
        return sum((p * s).sum() for p, s in zip(self.parameters(), slopes, strict=True))


def slopes_of(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=generator) for p in Steep().parameters()]


def flat_of(found: dict[str, dict[str, Tensor]]) -> Tensor:
    return torch.cat([tensor.flatten() for kind in found.values() for tensor in kind.values()])
