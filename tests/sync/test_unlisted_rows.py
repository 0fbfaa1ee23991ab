"""What trains wrong in silence and is in no list yet, beside the loops of `modes/test_parity.py`: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW

import syncline
from support.batches import Batch, fill
from support.catalogue import PROCESS_FABRICS
from support.losses import squared, squared_in_single
from support.models import mlp
from support.references import same_bits
from support.runs import DEADLINES, SMALL_BUCKETS
from support.trainees import place_of
from syncline.errors import ConfigError, Desync, RankFailed, ReplicasDiverged

REFUSALS = (ConfigError, Desync, ReplicasDiverged)
EVERY_FABRIC = ["threads", *(pytest.param(name, marks=pytest.mark.slow) for name in PROCESS_FABRICS)]


def wrong(what: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"none: {what}")


def on_ranks(work: Callable[[syncline.Fabric], Any], fabric: str = "threads") -> list[Any]:
    """What ranks return; nothing if they refuse."""
    try:
        return syncline.run(work, 2, fabric, DEADLINES)
    except RankFailed as failed:
        if all(isinstance(error, REFUSALS) for error in failed.failures.values()):
            return []
        raise


# Optimizers that differ from the start


def resumed_on_one(fabric: syncline.Fabric, mode: str) -> Tensor:
    """Rank 0 alone has loaded a checkpoint before Sync, which gives its weights to all, and its momenta to nobody."""
    model = fill(mlp(), seed=0)
    optimizer = AdamW(model.parameters(), lr=0.01)
    if fabric.rank == 0:
        train(model, optimizer, rank=0, steps=range(100, 103))
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, **SMALL_BUCKETS)
    train(model, optimizer, fabric.rank, range(4))
    sync.drain()
    sync.close()
    return place_of(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        squared(model, Batch(rank, step)).backward()
        optimizer.step()


@pytest.mark.parametrize("fabric", EVERY_FABRIC)
@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_ranks_whose_optimizers_differ_from_the_start_stay_together_or_are_refused(mode: str, fabric: str) -> None:
    ranks = on_ranks(partial(resumed_on_one, mode=mode), fabric)
    assert all(same_bits(ranks[0], other) for other in ranks[1:])


# Periods that do not end


def waiting_for_a_phase(fabric: syncline.Fabric, mode: str, starts: int) -> None:
    """The second optimizer begins in a later step."""
    model = fill(mlp(), seed=0)
    first, second = SGD(model[:3].parameters(), lr=0.1), SGD(model[3:].parameters(), lr=0.1)
    sync = syncline.Sync(model, [first, second], fabric=fabric, mode=mode)
    for step in range(30):
        model.zero_grad()
        squared(model, Batch(fabric.rank, step)).backward()
        first.step()
        if step >= starts:
            second.step()
    sync.close()


@pytest.mark.parametrize("mode", ["local:every=2", "slowmo:every=2", "diloco:every=2"])
def test_ranks_are_told_once_that_they_wait_for_an_optimizer_that_does_not_step(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    syncline.run(partial(waiting_for_a_phase, mode=mode, starts=30), 2, "threads", DEADLINES)
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert message.startswith("optimizer 2 (SGD) has not stepped while others of this Sync made 12 steps")


@pytest.mark.parametrize("starts", [0, 8])
def test_nobody_is_warned_of_an_optimizer_that_begins_a_little_later(
    starts: int, caplog: pytest.LogCaptureFixture
) -> None:
    syncline.run(partial(waiting_for_a_phase, mode="local:every=2", starts=starts), 2, "threads", DEADLINES)
    assert not caplog.messages


def test_an_optimizer_that_looks_at_its_loss_many_times_in_a_step_is_none_that_does_not_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(fabric: syncline.Fabric) -> None:
        model = fill(mlp(), seed=0)
        optimizer = LBFGS(model.parameters(), max_iter=30, line_search_fn="strong_wolfe")
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="local:every=2")
        looked = 0

        def closure() -> Tensor:
            nonlocal looked
            looked += 1
            optimizer.zero_grad()
            loss = squared(model, Batch(fabric.rank, 0))
            loss.backward()
            return loss

        optimizer.step(closure)
        assert looked > 12  # where a warning would come
        sync.close()

    syncline.run(work, 2, "threads", DEADLINES)
    assert not caplog.messages


# Types


CODECS = ["fp16", "bf16", "int8", "int4", "onebit", "topk:0.1", "randomk:0.1", "powersgd:2", "dgc:0.1"]


def in_single(fabric: syncline.Fabric, codec: str) -> Tensor:
    model = fill(mlp(torch.float32), seed=0)
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec)
    for step in range(4):
        optimizer.zero_grad()
        squared_in_single(model, Batch(fabric.rank, step)).backward()
        optimizer.step()
    sync.close()
    return place_of(model)


@pytest.mark.parametrize("codec", CODECS)
def test_what_new_tensors_are_by_default_is_nothing_to_a_codec(codec: str) -> None:
    wanted = on_ranks(partial(in_single, codec=codec))
    torch.set_default_dtype(torch.float64)
    try:
        found = on_ranks(partial(in_single, codec=codec))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(same_bits, found, wanted))


# Steps that are skipped


def with_a_lossy_pull(fabric: syncline.Fabric, skipped: bool) -> Tensor:
    """The third step has a NaN on rank 1, or is left out by all; parameters come back in 8 bits."""
    model = fill(mlp(torch.float32), seed=0)
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode="bounded:ahead=0,pull=int8", codec="topk:0.1")
    for step in range(6):
        if step != 2 or skipped:
            optimizer.zero_grad()
            factor = torch.nan if (fabric.rank, step) == (1, 2) else 1.0
            (squared_in_single(model, Batch(fabric.rank, step)) * factor).backward()
            optimizer.step()
    sync.drain()
    sync.close()
    return place_of(model)


@pytest.mark.slow
@wrong("bounded, async: after a step that all skip a lossy pull goes on, so that later gradients are others")
def test_a_step_that_is_skipped_pulls_nothing() -> None:
    found, never = (on_ranks(partial(with_a_lossy_pull, skipped=skipped), "torch") for skipped in (True, False))
    assert all(same_bits(one, other) for one, other in zip(found, never, strict=True))
