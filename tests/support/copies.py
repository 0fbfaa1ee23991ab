"""Copies of a model in training, made and used by one rank alone. Light: ranks import it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

import syncline
from support.guarded import Net, batch, filled, snapshot
from syncline.fabric.base import Fabric


def use(model: nn.Module) -> None:
    """Evaluate and train, as nobody else does."""
    model.eval()(batch(0, 0))
    model.train()(batch(0, 0)).sum().backward()


def from_file(something: object) -> object:
    file = io.BytesIO()
    torch.save(something, file)
    assert b"syncline" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def copy_model(model: nn.Module, optimizer: Optimizer) -> None:
    use(copy.deepcopy(model))


def copy_twice(model: nn.Module, optimizer: Optimizer) -> None:
    use(copy.deepcopy(copy.deepcopy(model)))


def average_model(model: nn.Module, optimizer: Optimizer) -> None:
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    use(averaged)


def save_model(model: nn.Module, optimizer: Optimizer) -> None:
    use(from_file(model))


def pickle_copy(model: nn.Module, optimizer: Optimizer) -> None:
    use(pickle.loads(pickle.dumps(copy.deepcopy(model))))


def train_copies(model: nn.Module, optimizer: Optimizer) -> None:
    model, optimizer = copy.deepcopy((model, optimizer))
    use(model)
    optimizer.step()


def save_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    from_file(optimizer).step()


def save_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    saved = from_file(gradients_of(model))
    assert all(map(torch.equal, saved, copy.deepcopy(gradients_of(model))))


def share_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    for gradient in gradients_of(model):
        gradient.share_memory_()


def share_model(model: nn.Module, optimizer: Optimizer) -> None:
    model.share_memory()


def queue_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    for gradient in gradients_of(model):
        queue.put(gradient)
    queue.close()


WAYS: tuple[Callable[[nn.Module, Optimizer], None], ...] = (
    copy_model,
    copy_twice,
    average_model,
    save_model,
    pickle_copy,
    train_copies,
    save_optimizer,
    save_gradients,
    share_gradients,
    share_model,
    queue_gradients,
)


def train_beside_copies(fabric: Fabric, mode: str) -> dict[str, list[Tensor]]:
    """Parameters after five steps; the last rank makes copies before and after one of them, in every way or in none."""
    return {getattr(way, "__name__", ""): train_beside(fabric, mode, way) for way in (None, *WAYS)}


def train_beside(fabric: Fabric, mode: str, way: Callable[[nn.Module, Optimizer], None] | None) -> list[Tensor]:
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    copies = way is not None and fabric.rank == fabric.world - 1
    for step in range(5):
        optimizer.zero_grad()
        model(batch(fabric.rank, step)).square().mean().backward()
        if copies and step == 2:
            way(model, optimizer)
        optimizer.step()
        if copies and step == 3:
            way(model, optimizer)
    sync.drain()
    sync.close()
    return snapshot(model)
