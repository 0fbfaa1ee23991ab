"""A gradient's way, followed by a tracer: from the autograd hook to the wire it enters few functions of ours."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import syncline
from support.catalogue import PROCESS_FABRICS

SOURCE = str(Path(syncline.__file__).parent)
MOST_CALLS = 30  # distinct functions of ours, from the hook to the wire
CALLBACKS_UPWARD = {"fingerprint", "pass_ended", "also_synchronize"}


def walk(fabric: syncline.Fabric, codec: str) -> tuple[list[str], list[str]]:
    """Functions entered on the autograd thread: by the last gradient until its bucket has left, and in all."""
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, bucket_bytes=1000, divergence_guard=False)
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            name = frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name
            entered.append(f"{Path(frame.f_code.co_filename).stem}.{name}")

    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.full((2, 30), 1.0 + fabric.rank)).sum()
        sys.setprofile(note if step == 2 else None)
        loss.backward()
        sys.setprofile(None)
        optimizer.step()
    sync.close()
    rest = next(number for number, name in enumerate(entered) if name.endswith("send_the_rest"))
    first = max(number for number, name in enumerate(entered[:rest]) if name.endswith("gradient_came"))
    left = first + entered[first:].index("reducer.Reducer.publish")  # the bucket is on the wire, and the rank says so
    way = [name for name in entered[first:left] if "<listcomp>" not in name]
    return list(dict.fromkeys(way)), list(dict.fromkeys(entered))


@pytest.mark.parametrize("codec", ["none", "topk:0.1"])
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_a_gradient_enters_few_functions_on_its_way_to_the_wire(fabric: str, codec: str) -> None:
    for way, everything in syncline.run(partial(walk, codec=codec), 2, fabric):
        assert any(name.endswith("Path.start") for name in way)
        assert len(way) <= MOST_CALLS, way
        listeners = {name.rpartition(".")[2] for name in everything if name.startswith("gradients.GradientDriver.")}
        assert listeners >= CALLBACKS_UPWARD
