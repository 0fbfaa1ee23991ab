"""Ranks whose models or settings differ from the start. Light: ranks import it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import syncline
from support.guarded import Net, filled, train
from syncline.errors import LayoutMismatch
from syncline.fabric.base import Fabric


class RenamedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fourth = self.third
        del self.third


class WiderNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(8, 5)


class DoubleNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.third.double()


class ReorderedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        first = self.first
        del self.first
        self.first = first


class FrozenNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.bias.requires_grad_(False)


class BufferedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3))


class TransposedNet(Net):
    """Other strides, as those of `model.to(memory_format=torch.channels_last)` are."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.data = self.second.weight.data.t().contiguous().t()


class TiedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.bias = self.first.bias


class AliasedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.bias.data = self.first.bias.data


# What the odd rank has: its model and its settings.
LAYOUTS: dict[str, tuple[type[Net], dict[str, object]]] = {
    "names": (RenamedNet, {}),
    "shapes": (WiderNet, {}),
    "dtypes": (DoubleNet, {}),
    "order": (ReorderedNet, {}),
    "requires_grad": (FrozenNet, {}),
    "buffers": (BufferedNet, {}),
    "strides": (TransposedNet, {}),
    "tied": (TiedNet, {}),
    "aliased": (AliasedNet, {}),
    "settings": (Net, {"bucket_bytes": 1234}),
}


def differ_in_layout(fabric: Fabric, odd: int) -> dict[str, tuple[str, str, bool, float]]:
    """For each difference: the error, its text, whether parameters are as before, and a sum made afterwards."""
    found = {}
    for name, (build, settings) in LAYOUTS.items():
        is_odd = fabric.rank == odd
        trained = train(fabric, 0, build=build if is_odd else Net, prepare=own_numbers, **(settings if is_odd else {}))
        same = all(map(torch.equal, trained.parameters[0], trained.at_the_end))
        afterwards = fabric.all_reduce(torch.tensor([1.0 + fabric.rank])).item()
        found[name] = trained.error, trained.message, same, afterwards
    return found


class Images(nn.Module):
    """Convolutions, one of whose weights has dimensions of size 1, and a layer that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 2, 1)
        self.third = nn.Conv2d(2, 3, 2).requires_grad_(False)
        self.register_buffer("mask", torch.arange(24.0).view(1, 2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def convert_between_steps(
    fabric: Fabric, converts: dict[int, list[int]], unfreezes: int, **settings: Any
) -> list[Tensor]:
    """Parameters after four steps, of which before some a rank has its model in another memory format.

    Before step -1 there is no `Sync` yet.
    """
    model = filled(Images())
    if -1 in converts.get(fabric.rank, ()):
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = syncline.Sync(model, optimizer, fabric=fabric, **settings)
    draws = torch.Generator().manual_seed(fabric.rank)
    for step in range(4):
        if step in converts.get(fabric.rank, ()):
            model.to(memory_format=torch.channels_last)
        if step == unfreezes:
            model.third.requires_grad_(True)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 6, 6, generator=draws)).square().mean().backward()
        optimizer.step()
        fabric.barrier()  # so that servers take pushes in the same order
    sync.drain()
    return [parameter.detach().clone(memory_format=torch.contiguous_format) for parameter in model.parameters()]


def say_of_formats(fabric: Fabric, odd: int, mode: str) -> str:
    """What is said when one rank has its convolutions in another memory format than the others."""
    model = Images()
    if fabric.rank == odd:
        model.to(memory_format=torch.channels_last)
    try:
        syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=fabric, mode=mode)
    except LayoutMismatch as error:
        return str(error)
    return ""


def settle_formats(fabric: Fabric, buffers: str) -> Tensor:
    """A buffer after a step, of which ranks have the same elements in different places."""
    model = filled(Images())
    if fabric.rank == 1:
        model.mask = model.mask.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters())
    syncline.Sync(model, optimizer, fabric=fabric, buffers=buffers)
    model(torch.ones(2, 3, 6, 6)).mean().backward()
    optimizer.step()
    return model.mask.contiguous()


def own_numbers(rank: int, model: nn.Module) -> None:
    filled(model, seed=rank)
