"""The models of tests that train: each has something that a reducer may stumble over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.batches import HIDDEN, INPUTS, OUTPUTS, WORDS


def mlp(dtype: torch.dtype = torch.float64, layers: int = 3, width: int = HIDDEN) -> nn.Sequential:
    """Several layers, of which each has a bucket of its own when buckets are small."""
    sizes = [INPUTS, *[width] * (layers - 1), OUTPUTS]
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        modules += [nn.Linear(inputs, outputs, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*modules[:-1])


def frozen_below() -> nn.Sequential:
    """Only the last layer learns, until somebody changes that."""
    model = mlp()
    model[:4].requires_grad_(False)
    return model


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = mlp(torch.float32)
        self.brain = mlp(torch.bfloat16)
        self.wide = mlp(torch.float64)
        self.gain = nn.Parameter(torch.ones(OUTPUTS, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Three answers that have nothing to do with each other, so that the exact one is exact."""
        return torch.stack(
            [self.single(x.float()).double(), self.brain(x.bfloat16()).double(), self.gain * self.wide(x)]
        )


class Tied(nn.Module):
    """The same matrix turns words into vectors and vectors into words."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN, sparse=sparse, dtype=torch.float64)
        self.body = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.scores = nn.Linear(HIDDEN, WORDS, dtype=torch.float64)
        self.scores.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.scores(self.body(self.words(words)).tanh())


class Branches(nn.Module):
    """Parts that are used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.always = mlp()
        self.sometimes = mlp()
        self.here_and_there = mlp()
        self.never = mlp()

    def forward(self, x: Tensor, names: Sequence[str]) -> Tensor:
        return sum((self.get_submodule(name)(x) for name in names), torch.zeros((), dtype=x.dtype))


class Words(nn.Module):
    """Sparse gradients beside dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN, sparse=True, dtype=torch.float64)
        self.bag = nn.EmbeddingBag(WORDS, HIDDEN, sparse=True, mode="sum", dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, OUTPUTS, dtype=torch.float64)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words).mean(dim=1).tanh() + self.bag(words))


class OddLayouts(nn.Module):
    """Parameters that are not laid out row by row: transposed, permuted, and with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.zeros(HIDDEN, INPUTS, dtype=torch.float64).t())
        self.with_gaps = nn.Parameter(torch.zeros(HIDDEN, 2 * HIDDEN, dtype=torch.float64)[:, ::2])
        self.permuted = nn.Parameter(torch.zeros(2, OUTPUTS, HIDDEN, dtype=torch.float64).permute(2, 0, 1))
        self.single = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = ((x @ self.transposed).tanh() @ self.with_gaps).tanh()
        return torch.einsum("rh,hko->ro", hidden, self.permuted) + self.single + self.empty.sum()


def convolutions(layout: torch.memory_format = torch.channels_last) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, dtype=torch.float64),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, dtype=torch.float64),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, OUTPUTS, dtype=torch.float64),
    )
    return model.to(memory_format=layout)


def normalized() -> nn.Module:
    """The first layer sees the data, so that its statistics have a closed form."""
    return nn.Sequential(
        nn.BatchNorm1d(INPUTS, dtype=torch.float64),
        nn.Linear(INPUTS, HIDDEN, dtype=torch.float64),
        nn.Tanh(),
        nn.BatchNorm1d(HIDDEN, dtype=torch.float64),
        nn.Linear(HIDDEN, OUTPUTS, dtype=torch.float64),
    )


class Checkpointed(nn.Module):
    """Every parameter is in a segment that is computed again in the backward pass; `shared` is in two of them."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = mlp(layers=2)
        self.shared = nn.Linear(OUTPUTS, OUTPUTS, dtype=torch.float64)
        self.second = nn.Linear(OUTPUTS, OUTPUTS, dtype=torch.float64)
        self.third = nn.Linear(OUTPUTS, OUTPUTS, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for segment in (self.first, *self.segments()):
            x = checkpoint(segment, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return x

    def segments(self) -> list[Callable[[Tensor], Tensor]]:
        return [
            lambda x: self.second(self.shared(x).tanh()),
            lambda x: self.third(x).tanh(),
            lambda x: self.shared(x).tanh(),
        ]


class Pair(nn.Module):
    """Two models in one loop."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(mlp(), nn.Linear(OUTPUTS, OUTPUTS, dtype=torch.float64))
        self.critic = nn.Sequential(nn.Linear(OUTPUTS, HIDDEN, dtype=torch.float64), nn.Tanh())
        self.critic.append(nn.Linear(HIDDEN, 1, dtype=torch.float64))


class MoreAndMore(nn.Module):
    """A layer that is used in one segment, and in a later step in two; gradients come from the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.often = nn.Linear(INPUTS, INPUTS, dtype=torch.float64)
        self.middle = nn.Linear(INPUTS, INPUTS, dtype=torch.float64)
        self.last = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)

    def forward(self, x: Tensor, segments: int) -> Tensor:
        again = partial(checkpoint, use_reentrant=True, preserve_rng_state=False)
        x = x.clone().requires_grad_()
        if segments > 1:
            x = again(self.often, x).tanh()
        return self.last(again(self.often, again(self.middle, x).tanh()).tanh())


class UsedBackwards(nn.Module):
    """Layers that are used in another order than that of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(HIDDEN, OUTPUTS, dtype=torch.float64)
        self.middle = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.first = nn.Linear(INPUTS, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


class Boom(Exception):
    """What a trap raises."""


class Trap(torch.autograd.Function):
    """Passes everything on, and raises in the backward pass if it is armed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: bool) -> Tensor:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.armed:
            raise Boom
        return gradient, None


class Trapped(nn.Module):
    """Three layers, and traps at the places that the backward pass comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([part for part in mlp(layers=3) if isinstance(part, nn.Linear)])

    def forward(self, x: Tensor, armed: str = "") -> Tensor:
        if armed == "in forward":
            raise Boom
        x = Trap.apply(x.requires_grad_(), armed == "after all gradients")
        x = Trap.apply(self.layers[0](x).tanh(), armed == "after most gradients")
        x = Trap.apply(self.layers[1](x).tanh(), armed == "between gradients")
        return Trap.apply(self.layers[2](x), armed == "before all gradients")
