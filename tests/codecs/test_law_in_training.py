"""What was sent plus what was kept is the gradient, also where a training is not even: a script of `Sync` for each."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.guarded import filled

CODECS = ("topk:0.1", "int8", "dgc:0.1,momentum=0,warmup=0")
WIDTH = 40


def violation(fabric: syncline.Fabric, sync: syncline.Sync, name: str, moved: Tensor, slopes: Tensor) -> float:
    """How far what a parameter has moved and what is kept of it are from its slopes, relatively."""
    kept = sync.state_dict()["codec_state"]["residual"][name].view_as(moved).clone()
    wanted = fabric.all_reduce(slopes.clone(), op="mean")
    return float((moved + fabric.all_reduce(kept, op="mean") - wanted).norm() / wanted.norm())


def seldom_used(fabric: syncline.Fabric, codec: str, mode: str = "sync", in_turn: bool = False) -> list[float]:
    """The second parameter is used in one step of four, by all ranks or by one after the other."""
    model = nn.ParameterDict({"often": torch.zeros(WIDTH), "seldom": torch.zeros(WIDTH)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, mode=mode)
    slopes = {name: torch.zeros(WIDTH) for name in model}
    generator = torch.Generator().manual_seed(fabric.rank)
    for step in range(20):
        optimizer.zero_grad()
        used = ["often", "seldom"] if step % 4 == fabric.rank * in_turn else ["often"]
        given = {name: torch.randn(WIDTH, generator=generator) for name in used}
        sum((model[name] * slope).sum() for name, slope in given.items()).backward()
        optimizer.step()
        for name, slope in given.items():
            slopes[name] += slope
    sync.drain()
    return [violation(fabric, sync, name, -model[name].detach(), slopes[name]) for name in model]


@pytest.mark.parametrize("codec", CODECS)
def test_of_what_nobody_used_nothing_that_was_kept_is_lost(codec: str) -> None:
    for found in syncline.run(partial(seldom_used, codec=codec), ranks=2, fabric="threads"):
        assert max(found) < 1e-5


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("mode", ["async", "bounded:ahead=2", "bounded:ahead=0"])
@pytest.mark.parametrize("codec", CODECS)
def test_of_what_a_worker_did_not_use_nothing_that_was_kept_is_lost(codec: str, mode: str, in_turn: bool) -> None:
    work = partial(seldom_used, codec=codec, mode=mode, in_turn=in_turn)
    for found in syncline.run(work, ranks=2, fabric="threads"):
        assert max(found) < 1e-5


def with_sparse_nan(fabric: syncline.Fabric, codec: str) -> float:
    """A sparse gradient, which goes its own way, is not finite on one rank in one step."""
    parts = {"sparse": nn.Embedding(10, 3, sparse=True), "dense": nn.Linear(WIDTH, 1, bias=False)}
    model = filled(nn.ModuleDict(parts))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec)
    start = model["dense"].weight.detach().clone()
    slopes = torch.zeros(1, WIDTH)
    generator = torch.Generator().manual_seed(fabric.rank)
    for step in range(6):
        optimizer.zero_grad()
        slope = torch.randn(1, WIDTH, generator=generator)
        is_bad = step == 3 and fabric.rank == 0
        weight = float("nan") if is_bad else 1.0
        looked_up = model["sparse"](torch.tensor([fabric.rank])).sum()
        (looked_up * weight + (model["dense"].weight * slope).sum()).backward()
        optimizer.step()
        if step != 3:
            slopes += slope
    return violation(fabric, sync, "dense.weight", start - model["dense"].weight.detach(), slopes)


@pytest.mark.parametrize("codec", CODECS)
def test_a_step_that_a_sparse_gradient_spoils_commits_nothing(codec: str) -> None:
    assert max(syncline.run(partial(with_sparse_nan, codec=codec), ranks=2, fabric="threads")) < 1e-5


def ignoring(fabric: syncline.Fabric) -> Tensor:
    """A mean that gradients of fp16 cannot hold, beside gradients of fp32, where nobody is to look."""
    model = nn.ParameterDict({"narrow": torch.zeros(20).half(), "wide": torch.zeros(20)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    codec = "randomk:0.5,scaled=true,feedback=false"  # which keeps nothing, so that it cannot be sent later
    syncline.Sync(model, optimizer, fabric=fabric, codec=codec, nonfinite="ignore")
    generator = torch.Generator().manual_seed(fabric.rank)
    for _ in range(4):
        optimizer.zero_grad()
        slope = torch.randn(20, generator=generator)
        ((model["narrow"] * 60_000).float().sum() + (model["wide"] * slope).sum()).backward()
        optimizer.step()
    return model["wide"].detach().clone()


def test_what_does_not_fit_parts_no_replicas_where_it_is_ignored() -> None:
    first, second = syncline.run(ignoring, ranks=2, fabric="threads")
    assert torch.equal(first.nan_to_num(), second.nan_to_num())


def narrow_with_much_kept(fabric: syncline.Fabric) -> float:
    """Two large gradients of fp16, most of which is kept, come to more than fp16 holds; then small ones follow."""
    model = nn.ParameterDict({"narrow": torch.zeros(20).half()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec="topk:0.1", nonfinite="raise")
    applied, slopes = torch.zeros(20), torch.zeros(20)
    for step in range(40):
        optimizer.zero_grad()
        slope = (40_000.0 if step < 2 else 1.0) * (1 + torch.arange(20.0) / 100)
        (model["narrow"] * slope.half()).sum().backward()
        optimizer.step()
        applied += model["narrow"].grad.float()
        slopes += slope.half().float()
    return violation(fabric, sync, "narrow", applied, slopes)


def test_what_fp16_cannot_hold_at_once_comes_later() -> None:
    assert max(syncline.run(narrow_with_much_kept, ranks=2, fabric="threads")) < 1e-3
