"""Replicas that drift apart. Light: ranks import it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer


def flip_a_bit(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    if rank == 1:
        model.second.weight.data.view(-1).view(torch.int32)[11] ^= 1


def change_a_sign_of_zero(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    model.second.weight.data[2, 3] = -0.0 if rank == 1 else 0.0


def swap_two(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    if rank == 1:
        flat = model.second.weight.data.view(-1)
        flat[[4, 5]] = flat[[5, 4]]


def change_optimizer_state(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    if rank == 1:
        optimizer.state[model.second.weight]["exp_avg"].view(-1).view(torch.int32)[0] ^= 1


def lose_optimizer_state(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    if rank == 1:
        optimizer.state.pop(model.second.weight)


@dataclass(frozen=True)
class Tampers:
    """Something changes on one rank before a step."""

    step: int
    change: Callable[[int, nn.Module, Optimizer], None]

    def __call__(self, rank: int, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step == self.step:
            self.change(rank, model, optimizer)
