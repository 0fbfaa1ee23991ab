"""With `lean` the same stages come in another order: the same bits with one residual less."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.guarded import filled
from support.references import same_bits


def train(fabric: syncline.Fabric, codec: str, lean: bool, dtype: torch.dtype) -> Tensor:
    """Parameters after some steps, of which one has a NaN on one rank."""
    model = filled(nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20)).to(dtype), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, lean=lean, bucket_bytes=2000)
    for step in range(6):
        factor = torch.nan if (step, fabric.rank) == (3, 1) else 1.0
        given = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + fabric.rank)).to(dtype)
        optimizer.zero_grad()
        (model(given).square().mean() * factor).backward()
        optimizer.step()
    sync.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", ["fp16", "topk:0.1", "int8", "onebit", "powersgd:2", "dgc:0.1,warmup=0"])
def test_lean_gives_the_same_bits(codec: str, dtype: torch.dtype) -> None:
    lean, usual = (
        syncline.run(partial(train, codec=codec, lean=lean, dtype=dtype), 3, "threads") for lean in (True, False)
    )
    assert all(same_bits(one, lean[0]) for one in [*lean, *usual])
