"""A multilayer perceptron: many parameters for little computation, so that communication weighs most."""

from __future__ import annotations

from torch import nn

from syncline.workloads.seeded import seeded


def make_mlp(width: int = 2304, layers: int = 7, seed: int = 0) -> nn.Sequential:
    """Square layers; 7 of width 2304 are 37 million parameters."""
    with seeded(seed):
        return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


def make_many_small(blocks: int = 100, width: int = 64, seed: int = 0) -> nn.Sequential:
    """Four small parameters in each block: 100 blocks have 400."""
    with seeded(seed):
        parts = ((nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(blocks))
        return nn.Sequential(*(part for block in parts for part in block))
