"""How much memory a rank has at its most while it trains."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch
from torch import nn

import syncline
from syncline.bench.training import resident_bytes

LAYERS, WIDTH = 32, 512
BUCKET_BYTES = 2 << 20
GRADIENT_BYTES = 4 * LAYERS * WIDTH**2  # and as many of parameters

# <malloc.h>
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


@dataclass(frozen=True)
class Weighed:
    """One rank."""

    peak_bytes: int  # above what it had before the model was made
    said_bytes: float  # in a step, instead of the gradients


def weigh(fabric: syncline.Fabric, codec: str, lean: bool = False) -> Weighed:
    """Train, after a small training that loads what is loaded late.

    Pages of others that this rank has read or written are not counted.
    """
    give_back_at_once()
    train(fabric, codec, 2, 64, lean)
    before, shared_before = resident_bytes("VmRSS"), resident_bytes("RssShmem")
    sync = train(fabric, codec, LAYERS, WIDTH, lean)
    of_others = resident_bytes("RssShmem") - shared_before - GRADIENT_BYTES
    peak = resident_bytes("VmHWM") - before - max(of_others, 0)
    return Weighed(peak, sync.report().sent_bytes)


def give_back_at_once() -> None:
    """Have freed memory given back, so that what is resident is what is in use."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # the user has chosen, so `Sync` does not
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, 65536)
    mallopt(M_ARENA_MAX, 1)


def train(fabric: syncline.Fabric, codec: str, layers: int, width: int, lean: bool) -> syncline.Sync:
    """A few steps, with other data on every rank. Buckets are made anew after the first."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, bucket_bytes=BUCKET_BYTES, lean=lean)
    for step in range(3):
        draw = torch.Generator().manual_seed(1000 * fabric.rank + step)
        optimizer.zero_grad()
        model(torch.randn(4, width, generator=draw)).square().mean().backward()
        optimizer.step()
    return sync
