"""Ranks whose steps are traced. Light: ranks import it."""

from __future__ import annotations

import time
from functools import partial

import torch

import syncline
from support.faulty import arm_forward, one_step
from support.guarded import ONE_EACH, Net, batch, filled
from syncline.fabric.base import Fabric
from syncline.tracing.spans import StepSpan

SLEEP_S = 0.2


def spans_of_training(fabric: Fabric, steps: int, slow: int = -1, bad: int = 0, **settings: object) -> list[StepSpan]:
    """The spans of every step; one rank may be slow in its forward pass, and rank 0 have a bad batch in a step."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, **(ONE_EACH | settings))
    if fabric.rank == slow:
        arm_forward(model, optimizer, partial(time.sleep, SLEEP_S))
    for step in range(1, steps + 1):
        factor = torch.inf if (fabric.rank, step) == (0, bad) else 1.0
        one_step(model, optimizer, factor * batch(fabric.rank, step))
    sync.drain()
    return list(sync.recorder.steps)
