"""Ranks whose models or settings differ from the start. Light: ranks import it."""

from __future__ import annotations

import torch
from torch import nn

from support.guarded import Net, filled, train
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


# What the odd rank has: its model and its settings.
LAYOUTS: dict[str, tuple[type[Net], dict[str, object]]] = {
    "names": (RenamedNet, {}),
    "shapes": (WiderNet, {}),
    "dtypes": (DoubleNet, {}),
    "order": (ReorderedNet, {}),
    "requires_grad": (FrozenNet, {}),
    "buffers": (BufferedNet, {}),
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


def own_numbers(rank: int, model: nn.Module) -> None:
    filled(model, seed=rank)
