"""Replicas that train on threads, and what must be equal among them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import syncline
from support.guarded import Trained, train
from support.references import same_bits
from syncline import Deadlines

WORLD, VICTIM = 3, 1
SOON_S = 3.0  # within which a fault is noticed, from when it could be
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def train_threads(steps: int, world: int = WORLD, **settings: object) -> list[Trained]:
    """The ranks of a training in this process."""
    return syncline.run(partial(train, steps=steps, **settings), world, "threads", Deadlines(20.0))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists hold the same bits."""
    return len(one) == len(other) and all(map(same_bits, one, other))


def assert_replicas(ranks: list[Trained]) -> None:
    """After every step all ranks had the same parameters and optimizer state."""
    for rank in ranks[1:]:
        for mine, theirs in zip(ranks[0].parameters, rank.parameters, strict=True):
            assert same(mine, theirs)
        for mine, theirs in zip(ranks[0].states, rank.states, strict=True):
            assert same(mine, theirs)
