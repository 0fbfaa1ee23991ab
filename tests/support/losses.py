"""Losses: what one batch says about a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from support.batches import Batch


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x) - batch.y).square().mean()


def squared_in_single(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x.float()) - batch.y.float()).square().mean()


def squared_under_autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return squared_in_single(model, batch)


def squared_of_a_leaf(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x.clone().requires_grad_()) - batch.y).square().mean()


def squared_of_words(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.words) - batch.y).square().mean()


def squared_of_images(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.image.contiguous(memory_format=torch.channels_last)) - batch.y).square().mean()


def next_word(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch.words[:, 0]), batch.words[:, 0].roll(1))


def of_branches(model: nn.Module, batch: Batch) -> Tensor:
    names = ["always"]
    if batch.step % 2:
        names.append("sometimes")
    if batch.step > 1 and (batch.rank + batch.step) % 2:
        names.append("here_and_there")
    return (model(batch.x, names) - batch.y).square().mean()


def absent_on_a_rank(
    model: nn.Module, batch: Batch, otherwise: Callable[[nn.Module, Batch], Tensor] = squared
) -> Tensor:
    """In some steps, the first of them one, a rank has nothing to say about any parameter."""
    if (batch.rank, batch.step) in ((1, 0), (0, 2), (1, 3)):
        return torch.zeros((), dtype=torch.float64, requires_grad=True) * 1.0
    return otherwise(model, batch)


def with_gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that has a gradient in it."""
    x = batch.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return squared(model, batch) + slope.square().mean()


def infinite_once(model: nn.Module, batch: Batch) -> Tensor:
    """One batch of one rank is too much in one step."""
    return squared(model, batch) * (torch.inf if (batch.rank, batch.step) == (1, 2) else 1.0)
