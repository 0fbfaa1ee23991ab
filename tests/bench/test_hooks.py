"""The small hooks: they give the mean, what they do not send they send later, and they agree with our codecs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import syncline
from syncline.bench.contenders import Contender
from syncline.bench.hooks import most_bytes
from syncline.codecs import kernels
from syncline.units import MIB

WORLD, STEPS = 3, 4


def tall() -> nn.Module:
    """Of an odd number of parameters, in several buckets of 64 KiB."""
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(101, 101) for _ in range(6)))


def gradients_with(fabric: syncline.Fabric, name: str) -> list[torch.Tensor]:
    """The gradients of every step, flat; parameters stay as they are, and a rank's loss is its own."""
    model = tall()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attached = Contender(name, MIB // 16)(model, optimizer, fabric)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(100 * step + fabric.rank)
        attached.module(torch.randn(8, 101, generator=draw)).square().mean().backward()
        optimizer.step()
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
    attached.close()
    return seen


def all_gradients(fabric: syncline.Fabric) -> dict[str, list[torch.Tensor]]:
    names = ("ddp", "hook fp16", "hook int8", "hook topk:1.0", "hook topk:0.01", "syncline int8", "syncline topk:0.01")
    return {name: gradients_with(fabric, name) for name in names}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, list[torch.Tensor]]]:
    return syncline.run(all_gradients, ranks=WORLD, fabric="torch")


def distance(mine: torch.Tensor, exact: torch.Tensor) -> float:
    return float((mine - exact).norm() / exact.norm())


def test_all_ranks_have_the_same_bits(by_rank):
    for name, gradients in by_rank[0].items():
        for other in by_rank[1:]:
            assert all(map(torch.equal, gradients, other[name])), name


@pytest.mark.parametrize(("name", "most"), [("hook topk:1.0", 1e-6), ("hook fp16", 2e-3), ("hook int8", 2e-2)])
def test_a_hook_gives_the_mean(by_rank, name, most):
    for mine, exact in zip(by_rank[0][name], by_rank[0]["ddp"], strict=True):
        assert distance(mine, exact) < most


@pytest.mark.parametrize("name", ["int8", "topk:0.01"])
def test_what_was_not_sent_is_sent_later_and_no_less_than_by_our_codec(by_rank, name):
    """The first pass of a hook is exact and leaves no residual, so the sums of the others are compared."""
    exact, hook, codec = (by_rank[0][which][1:] for which in ("ddp", f"hook {name}", f"syncline {name}"))
    errors = [distance(sum(one), sum(exact)) for one in (hook, codec)]
    assert errors[0] <= 1.1 * errors[1]
    assert errors[0] < 0.9 * max(map(distance, hook, exact))  # one residual is missing from the sum, and not three


def test_top_k_sends_about_as_many_entries_as_it_says(by_rank):
    for gradient in by_rank[0]["hook topk:0.01"][1:]:
        assert 0.009 < float((gradient != 0).float().mean()) < 0.035


@pytest.mark.parametrize("numel", [1, 7, 1000, 70_001, 1_000_003])
@pytest.mark.parametrize("keep", [1e-4, 0.01, 0.3, 1.0])
def test_messages_of_any_entries_have_room(numel, keep):
    count = max(1, round(keep * numel))
    first, last = torch.arange(count), torch.arange(numel - count, numel)
    spread = torch.arange(count) * numel // count
    for positions in (first, last, spread, torch.randperm(numel)[:count].sort().values):
        assert len(kernels.take_entries(torch.ones(numel), positions, "fp32")) <= most_bytes(count, numel)
