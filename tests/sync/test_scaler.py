"""GradScaler when the last backward before a step was not synchronized: `sync.wait()` makes its verdict everyone's."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import syncline


def steps_with_an_overflow(fabric: syncline.Fabric, model: nn.Module) -> tuple[list[Tensor], float]:
    net = copy.deepcopy(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sync = syncline.Sync(net, optimizer, fabric=fabric, scaler=scaler, check_every=1)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + fabric.rank)
        x = torch.randn(4, 3, generator=generator)
        optimizer.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        overflows = step == 2 and fabric.rank == 1
        with sync.no_sync():
            scaler.scale(net(x).sum() * (float("inf") if overflows else 1.0)).backward()
        sync.wait()
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().clone() for p in net.parameters()], scaler.get_scale()


def test_an_overflow_on_one_rank_is_skipped_by_all_after_waiting() -> None:
    model = nn.Linear(3, 2)
    (first, scale), (second, other_scale) = syncline.run(
        lambda fabric: steps_with_an_overflow(fabric, model), ranks=2, fabric="threads"
    )
    assert scale == other_scale == 512.0
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(p.isfinite().all() for p in first)
    assert not torch.equal(first[0], model.weight)
