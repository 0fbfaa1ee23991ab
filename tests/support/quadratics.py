"""Quadratics whose minimum, or whose way there, has a closed form. Every rank has its own. Light: ranks import it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD

import syncline

CURVATURES = (1.0, 0.5, 2.0, 0.25, 1.5)  # of rank 0, 1, ...
CENTRES = (2.0, -1.0, 0.5, 4.0, -3.0)


class Point(nn.Module):
    """Two numbers, or more, that move independently."""

    def __init__(self, start: float = 5.0, size: int = 1) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((size,), start, dtype=torch.float64))
        self.y = nn.Parameter(torch.full((size,), -start, dtype=torch.float64))

    def forward(self, curvature: float, centre: float) -> Tensor:
        return (curvature / 2 * (self.place() - centre) ** 2).sum()

    def place(self) -> Tensor:
        return torch.cat([self.x, self.y])


@dataclass(frozen=True)
class Descent:
    """Gradient descent on the quadratics of all ranks."""

    mode: str
    lr: float
    steps: int
    codec: str = "none"
    momentum: float = 0.0
    nesterov: bool = False
    alike: bool = False  # all ranks have the same quadratic, around 0
    drain: bool = False
    size: int = 1

    def __call__(self, fabric: syncline.Fabric) -> Tensor:
        """On one rank: where it has come to after every step."""
        model = Point(size=self.size)
        optimizer = SGD(model.parameters(), lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode=self.mode, codec=self.codec)
        curvature, centre = (1.0, 0.0) if self.alike else (CURVATURES[fabric.rank], CENTRES[fabric.rank])
        path = []
        for _ in range(self.steps):
            optimizer.zero_grad()
            torch.autograd.backward(model(curvature, centre))
            optimizer.step()
            path.append(model.place().detach())
        if self.drain:
            sync.drain()
            path.append(model.place().detach())
        sync.close()
        return torch.stack(path)


def local_fixed_point(world: int, lr: float, every: int) -> float:
    """Where local SGD ends: not at the minimum of the mean, because ranks drift."""
    pulls = [1 - (1 - lr * CURVATURES[rank]) ** every for rank in range(world)]
    return sum(pull * CENTRES[rank] for rank, pull in enumerate(pulls)) / sum(pulls)
