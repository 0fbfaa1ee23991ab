"""Workloads of the benchmarks: models with an optimizer and a loss, with data of its own on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.bench.trainer import Loss, Workload
from syncline.workloads.gpt import SHAPES, Shape, make_gpt, next_byte_loss
from syncline.workloads.mlp import make_many_small, make_mlp
from syncline.workloads.text import Batches, standard_library

HELD_OUT_BYTES = 200_000  # at the end of the text

library = cache(standard_library)  # read once in a process


def adamw(model: nn.Module, rate: float = 3e-4) -> Optimizer:
    """As people train transformers."""
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True)


def sgd(model: nn.Module, rate: float = 0.01, momentum: float = 0.0) -> Optimizer:
    """The cheapest optimizer."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def gpt_workload(
    shape: str | Shape, batch: int, optimizer: Callable[[nn.Module], Optimizer] = adamw, held_out: int = 0
) -> Workload:
    """A GPT on the text of the standard library, but for so many bytes at its end."""
    chosen = SHAPES[shape] if isinstance(shape, str) else shape
    text = library()
    batches = Batches(text[: len(text) - held_out], chosen.context, batch)

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return next_byte_loss(model, batches.of(step, rank))

    return Workload(f"GPT of {shape}, batch {batch}", partial(make_gpt, chosen), optimizer, loss)


@torch.no_grad()
def held_out_loss(model: nn.Module, shape: Shape, batch: int) -> Tensor:
    """The loss of a replica on text that nobody trained on."""
    return next_byte_loss(model, Batches(library()[-HELD_OUT_BYTES:], shape.context, batch).of(0, 0))


def answer_size(batch: int, width: int) -> Loss:
    """A loss: how large the answers to noise are."""

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        result: Tensor = model(torch.randn(batch, width, generator=generator)).square().mean()
        return result

    return loss


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt": partial(gpt_workload, "20M", 8),
    "gpt, larger batch": partial(gpt_workload, "20M", 32),
    "mlp": lambda: Workload("MLP of 37 M, batch 4", make_mlp, sgd, answer_size(4, 2304)),
    "many small": lambda: Workload("400 small parameters", make_many_small, adamw, answer_size(32, 64)),
}
