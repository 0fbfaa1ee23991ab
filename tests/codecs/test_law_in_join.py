"""Codecs where ranks have different numbers of batches: what was sent plus what was kept is still the gradient."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.guarded import filled
from support.steep import SMALL, Steep, flat_of, slopes_of


def kept_around_the_end_of_join(fabric: syncline.Fabric, codec: str, mode: str) -> list[Tensor]:
    """What is kept when the last step has been made, and when all ranks know that there are no more."""
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, mode=mode, **SMALL)
    with sync.join():
        for step in range(4):
            optimizer.zero_grad()
            model(slopes_of(step, fabric.rank)).backward()
            optimizer.step()
        before = copy.deepcopy(sync.state_dict()["codec_state"])
    after = sync.state_dict()["codec_state"]
    return [flat_of({kind: state[kind] for kind in ("residual", "state")}) for state in (before, after)]


@pytest.mark.parametrize("mode", ["sync", "local:every=2", "diloco:every=2"])
@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "powersgd:2", "dgc:0.1,warmup=0"])
def test_what_is_kept_is_not_sent_in_a_pass_that_nobody_uses(codec: str, mode: str) -> None:
    work = partial(kept_around_the_end_of_join, codec=codec, mode=mode)
    for before, after in syncline.run(work, ranks=2, fabric="threads"):
        assert before.any()
        assert torch.equal(before, after)


AFTERWARDS = 2  # steps of all ranks after uneven ones


def batches_of(counts: tuple[int, ...], step: int) -> list[int]:
    """The ranks that have a batch for a step."""
    return [rank for rank, count in enumerate(counts) if step < count or step >= max(counts)]


def moved_unevenly(fabric: syncline.Fabric, codec: str, counts: tuple[int, ...], **how: str) -> tuple[Tensor, Tensor]:
    """How far parameters went and what is still kept, in the units of a step."""
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    divide_by, decay = how.pop("divide_by"), float(how.pop("decay", "1"))
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, check_every=1, **how, **SMALL)

    def train(steps: range) -> None:
        for step in steps:
            optimizer.param_groups[0]["lr"] = 0.1 * decay**step
            optimizer.zero_grad()
            model(slopes_of(step, fabric.rank)).backward()
            optimizer.step()

    with sync.join(divide_by):
        train(range(counts[fabric.rank]))
    train(range(max(counts), max(counts) + AFTERWARDS))
    sync.drain()
    state = sync.state_dict()["codec_state"]
    kept = [state["residual"][name] * state["step_scale"][name] for name, _ in model.named_parameters()]
    return torch.cat([-p.detach().flatten() for p in model.parameters()]).double(), torch.cat(kept).double()


def mean_slope(counts: tuple[int, ...], step: int, divide_by: str) -> Tensor:
    """Over the ranks that have a batch, or over all where the others count as zero."""
    ranks = batches_of(counts, step)
    slopes = [torch.cat([slope.flatten() for slope in slopes_of(step, rank)]).double() for rank in ranks]
    return sum(slopes) / (len(counts) if divide_by == "world" else len(ranks))


@pytest.mark.parametrize("divide_by", ["world", "active"])
@pytest.mark.parametrize("counts", [(4, 4), (3, 4), (5, 1, 3), (1, 1, 6, 1)], ids=str)
@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "powersgd:2", "dgc:0.1,momentum=0"])
def test_sent_plus_kept_is_the_gradient_after_uneven_batches(
    codec: str, counts: tuple[int, ...], divide_by: str
) -> None:
    check_uneven_law(codec, counts, divide_by)


@pytest.mark.parametrize("how", [{"mode": "delayed"}, {"collective": "hierarchical:sizes=2+1"}], ids=str)
def test_sent_plus_kept_is_the_gradient_after_uneven_batches_elsewhere(how: dict[str, str]) -> None:
    """Where passes arrive late, and where ranks talk for others."""
    for divide_by in ("world", "active"):
        check_uneven_law("topk:0.1", (5, 1, 3), divide_by, **how)


@pytest.mark.parametrize("codec", ["int8", "topk:0.1"])
@pytest.mark.parametrize("counts", [(3, 4), (5, 1, 3)], ids=str)
def test_sent_plus_kept_is_how_far_ranks_went_after_uneven_batches(codec: str, counts: tuple[int, ...]) -> None:
    """Where parameters travel, means are over the ranks that still have data, whatever is asked for."""
    check_uneven_law(codec, counts, "active", mode="local:every=1")


@pytest.mark.parametrize("divide_by", ["world", "active"])
@pytest.mark.parametrize("counts", [(3, 4), (5, 1, 3)], ids=str)
@pytest.mark.parametrize("codec", ["topk:0.1", "powersgd:2"])
def test_sent_plus_kept_is_the_gradient_where_ranks_without_data_do_not_follow_a_schedule(
    codec: str, counts: tuple[int, ...], divide_by: str
) -> None:
    check_uneven_law(codec, counts, divide_by, decay="0.5")


def check_uneven_law(codec: str, counts: tuple[int, ...], divide_by: str, **how: str) -> None:
    work = partial(moved_unevenly, codec=codec, counts=counts, divide_by=divide_by, **how)
    found = syncline.run(work, ranks=len(counts), fabric="threads")
    rates = [0.1 * float(how.get("decay", "1")) ** step for step in range(max(counts) + AFTERWARDS)]
    exact = sum(rate * mean_slope(counts, step, divide_by) for step, rate in enumerate(rates))
    kept = torch.stack([kept for _, kept in found]).mean(0)
    for moved, _ in found:
        torch.testing.assert_close(moved + kept, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("divide_by", ["world", "active"])
@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_what_was_kept_is_not_sent_more_than_once_over_where_fewer_ranks_are_left(mode: str, divide_by: str) -> None:
    """All ranks but one have no more data, and what that one has is zero: what comes is what was kept, as it was owed.

    Everything is sent in that step, so nothing has to be made up for later.
    """

    def work(fabric: syncline.Fabric) -> tuple[Tensor, Tensor]:
        model = filled(nn.Linear(50, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, codec="topk:0.5")
        slopes = torch.randn(2, 50, generator=torch.Generator().manual_seed(fabric.rank))
        start = model.weight.detach().clone()
        with sync.join(divide_by):
            for step in range(2 if fabric.rank == 1 else 1):
                optimizer.zero_grad()
                (model(slopes[step]) * (1 - step)).sum().backward()
                optimizer.step()
        assert sync.reducer.path.joined is None  # after `join` nobody asks any more
        sync.drain()
        kept = sync.state_dict()["codec_state"]["residual"]["weight"]
        assert not kept.any()
        return start - model.weight.detach(), slopes[:1]

    found = syncline.run(work, ranks=4, fabric="threads")
    exact = torch.stack([slope for _, slope in found]).mean(0)
    for moved, _ in found:
        torch.testing.assert_close(moved, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divide_by", ["world", "active"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_goes_on_as_it_was_where_fewer_ranks_are_left(nesterov: bool, divide_by: str) -> None:
    counts, codec = (5, 1, 3), f"dgc:1.0,momentum=0.5,nesterov={str(nesterov).lower()}"
    work = partial(moved_unevenly, codec=codec, counts=counts, divide_by=divide_by)
    alone = torch.zeros(24 * 20 + 37 + 16 * 12 * 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([alone], lr=0.1, momentum=0.5, nesterov=nesterov)
    for step in range(max(counts) + AFTERWARDS):
        alone.grad = mean_slope(counts, step, divide_by)
        optimizer.step()
    for moved, _ in syncline.run(work, ranks=len(counts), fabric="threads"):
        torch.testing.assert_close(moved, -alone.detach(), rtol=1e-5, atol=1e-5)
