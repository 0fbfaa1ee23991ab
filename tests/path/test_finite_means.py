"""Means need no second look where the status says that sums fit, or decoding shows that 16 bits can hold them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import syncline
from support.guarded import filled

SAYS = {
    "topk:0.1": True,
    "int8": True,
    "powersgd:2": True,
    "fp16:feedback=true": True,
    "warmup:topk:0.1": True,
    "fp16": True,
    "bf16": True,
}


def finite_as_known(fabric: syncline.Fabric, codec: str, scale: float) -> tuple[list[bool | None], bool]:
    """What is known of the means after a backward pass, and whether the step was skipped."""
    model = filled(nn.Linear(30, 20), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec)
    before = model.weight.detach().clone()
    (model(torch.full((3, 30), float(fabric.rank + 1))).sum() * scale).backward()
    known = [bucket.buffer.finite for bucket in sync.reducer.layout.buckets]
    optimizer.step()
    sync.close()
    return known, torch.equal(before, model.weight)


@pytest.mark.parametrize("codec", SAYS)
def test_means_are_known_to_be_finite_where_sums_fit(codec: str) -> None:
    for known, was_skipped in syncline.run(partial(finite_as_known, codec=codec, scale=1.0), 2, "threads"):
        assert set(known) == {SAYS[codec]}
        assert not was_skipped


def test_a_mean_that_fp16_cannot_hold_is_found() -> None:
    for known, was_skipped in syncline.run(partial(finite_as_known, codec="fp16", scale=1e6), 2, "threads"):
        assert set(known) == {None}  # of a pass that nobody can use
        assert was_skipped


def good_passes(fabric: syncline.Fabric, codec: str, factors: list[float]) -> tuple[int, bool]:
    """How many passes were good, each with a factor on rank 1, and whether weights are finite."""
    model = filled(nn.Linear(30, 20), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec)
    for factor in factors:
        optimizer.zero_grad()
        (model(torch.ones(3, 30)).sum() * (factor if fabric.rank == 1 else 1.0)).backward()
        optimizer.step()
    sync.close()
    return sync.reducer.path.good_passes, bool(torch.isfinite(model.weight).all())


@pytest.mark.parametrize("factor", [torch.nan, torch.inf, 1e9])
@pytest.mark.parametrize("codec", ["fp16", "fp16:feedback=true", "topk:0.1"])
def test_a_pass_that_is_not_finite_on_one_rank_is_no_good_one(codec: str, factor: float) -> None:
    is_held = factor == 1e9 and codec != "fp16"  # in float32, or as much of it as fits
    found = syncline.run(partial(good_passes, codec=codec, factors=[1.0, factor, 1.0]), 2, "threads")
    assert found == [(2 + is_held, True)] * 2
