"""Codecs for plain DDP."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.errors import ConfigError
from syncline.integrations.ddp import attach

CODECS = ("none", "fp16", "int8", "onebit", "topk:0.1", "randomk:0.2", "powersgd:2")


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 10, generator=torch.Generator().manual_seed(100 * step + rank))


def train(codec: str, rank: int, steps: int = 8, interrupted: int = 0, bad: int = -1) -> list[Tensor]:
    model = net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hook = attach(ddp, codec, optimizer)
    kept_before: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = ddp(batch(step, rank)).square().mean()
        if step == bad and rank == 1:
            loss = loss * float("nan")
        if step == bad:
            kept_before = dict(hook.kept)
        loss.backward()
        if step == bad:
            assert all(parameter.grad.isnan().any() for parameter in model.parameters())
            assert all(torch.equal(kept_before[name], kept) for name, kept in hook.kept.items())
            continue
        optimizer.step()
        if step + 1 == interrupted:
            saved = hook.state_dict()
            hook.kept.clear()
            hook.load_state_dict(saved)
    hook.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def all_of_them(fabric: syncline.Fabric) -> dict[str, list[Tensor]]:
    found = {codec: train(codec, fabric.rank) for codec in CODECS}
    found["interrupted"] = train("topk:0.1", fabric.rank, interrupted=3)
    found["with a bad step"] = train("topk:0.1", fabric.rank, bad=4)
    return found


@pytest.mark.timeout(120)
def test_ddp_trains_through_every_codec_and_its_ranks_stay_equal() -> None:
    first, second = syncline.run(all_of_them, ranks=2, fabric="torch")
    for codec in first:
        assert all(torch.equal(one, other) for one, other in zip(first[codec], second[codec], strict=True)), codec
    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(8):
        optimizer.zero_grad()
        alone(torch.cat([batch(step, 0), batch(step, 1)])).square().mean().backward()
        optimizer.step()
    exact = [parameter.detach() for parameter in alone.parameters()]
    torch.testing.assert_close(first["none"], exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first["fp16"], exact, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(first["int8"], exact, rtol=1e-1, atol=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(first["topk:0.1"], first["interrupted"], strict=True))
    assert not torch.equal(first["topk:0.1"][0], first["none"][0])


def refuse(fabric: syncline.Fabric, other: nn.Module) -> str:
    with pytest.raises(ConfigError) as caught:
        attach(other, "int8")
    return str(caught.value)


def test_what_is_not_ddp_is_refused() -> None:
    [told] = syncline.run(partial(refuse, other=nn.Linear(2, 2)), ranks=1, fabric="threads")
    assert "Linear is not a DistributedDataParallel" in told
