"""What is unfrozen while a run goes on, in modes that average gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import syncline


def thawed_late(fabric: syncline.Fabric, mode: str, codec: str, at: int) -> tuple[float, float]:
    """How far a parameter that is unfrozen in a step has moved at the end, and how far it should have."""
    model = nn.ParameterDict({"first": torch.zeros(4), "second": torch.zeros(4)})
    model["second"].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, codec=codec)
    for step in range(8):
        if step == at:
            model["second"].requires_grad_(True)
        optimizer.zero_grad()
        slope = float(2**step * (1 + fabric.rank))
        (model["first"] * slope + model["second"] * slope).sum().backward()
        optimizer.step()
    sync.drain()
    return -float(model["second"].detach()[0]), sum(1.5 * 2**step for step in range(at, 8))


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", ["none", "fp16"])
@pytest.mark.parametrize("mode", ["sync", "delayed", "delayed:warmup=2"])
def test_all_gradients_of_what_is_unfrozen_count_from_the_first_on(mode: str, codec: str, at: int) -> None:
    for moved, wanted in syncline.run(partial(thawed_late, mode=mode, codec=codec, at=at), 2, "threads"):
        assert moved == wanted
