"""What loops do with gradients on their path, beside those of `modes/test_parity.py`: right answer, or refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import syncline
from support.batches import Batch, fill
from support.catalogue import PROCESS_FABRICS
from support.losses import squared, squared_in_single
from support.models import mlp
from support.on_a_line import RATE, START, Line, slope_of
from support.references import same_bits
from support.runs import DEADLINES, SMALL_BUCKETS
from support.trainees import place_of
from syncline.errors import ConfigError, Desync, RankFailed

WORLD = 2
EVERY_FABRIC = ["threads", *(pytest.param(name, marks=pytest.mark.slow) for name in PROCESS_FABRICS)]
MODES = ["sync", "delayed", "bounded:ahead=0", "async"]  # that send gradients


def on_ranks(work: Callable[[syncline.Fabric], Any], fabric: str = "threads") -> list[Any]:
    """What ranks return; nothing if they refuse."""
    try:
        return syncline.run(work, WORLD, fabric, DEADLINES)
    except RankFailed as failed:
        if all(isinstance(error, (ConfigError, Desync)) for error in failed.failures.values()):
            return []
        raise


# Hooks

CEILING = 1.5  # between the gradients of rank 0 and rank 1


def clamp_late(parameter: Tensor) -> None:
    """When a bucket that does not wait for this has left and has arrived."""
    time.sleep(0.1)
    parameter.grad.clamp_(max=CEILING)


def hooked_after(fabric: syncline.Fabric, mode: str, steps: int) -> Tensor:
    """How far parameters have gone, in gradients."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, first_bucket_bytes=16, bucket_bytes=16)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clamp_late)
    for _ in range(steps):
        optimizer.zero_grad()
        model(slope_of(fabric.rank)).backward()
        optimizer.step()
    sync.drain()
    sync.close()
    return (START - place_of(model)) / RATE


@pytest.mark.parametrize("fabric", EVERY_FABRIC)
@pytest.mark.parametrize("mode", MODES)
def test_hooks_that_are_set_after_sync_change_gradients_before_they_leave(mode: str, fabric: str) -> None:
    steps = 4
    for gone in on_ranks(partial(hooked_after, mode=mode, steps=steps), fabric):
        wanted = steps * (slope_of(0) + CEILING) / 2
        assert torch.equal(gone, torch.full_like(gone, wanted))


# Gradients that somebody holds

HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "detached": Tensor.detach,
    "a view": lambda gradient: gradient.view(-1)[1:],
    "numpy": Tensor.numpy,
}


def held_over_passes(fabric: syncline.Fabric, mode: str, how: str, passes: int = 4) -> list[bool]:
    """Whether what was held after a pass is the same after all of them."""
    model = fill(mlp(), seed=0)
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, **SMALL_BUCKETS)
    held, copies = [], []
    for number in range(passes):
        optimizer.zero_grad()
        squared(model, Batch(fabric.rank, number)).backward()
        found = [HOLDS[how](p.grad) for p in model.parameters() if p.grad is not None]
        held += found
        copies += [torch.as_tensor(one).clone() for one in found]
    optimizer.step()
    sync.close()
    return [torch.equal(torch.as_tensor(one), other) for one, other in zip(held, copies, strict=True)]


def assert_held(mode: str, how: str, fabric: str = "threads") -> None:
    for kept in on_ranks(partial(held_over_passes, mode=mode, how=how), fabric):
        assert kept
        assert all(kept)


@pytest.mark.parametrize("how", HOLDS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_somebody_holds_keep_their_values(mode: str, how: str) -> None:
    assert_held(mode, how)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_somebody_holds_keep_their_values_on_every_fabric(mode: str, fabric: str) -> None:
    assert_held(mode, "itself", fabric)


@pytest.mark.parametrize("how", HOLDS)
@pytest.mark.parametrize("mode", ["local:every=2", "slowmo:every=2", "diloco:every=2"])
def test_gradients_that_nobody_sends_keep_their_values(mode: str, how: str) -> None:
    assert_held(mode, how)


def memory_over_passes(fabric: syncline.Fabric, mode: str, codec: str, to_none: bool) -> int:
    """How many memories the first bucket has had in a loop that holds nothing."""
    model = fill(mlp(torch.float32), seed=0)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, codec=codec, **SMALL_BUCKETS)
    seen = []
    for number in range(8):
        optimizer.zero_grad(set_to_none=to_none)
        squared_in_single(model, Batch(fabric.rank, number)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        buffers = sync.reducer.layout.buckets[0].buffers
        seen += [buffer.values for buffer in buffers if not any(buffer.values is one for one in seen)]
    sync.close()
    return len(seen)


@pytest.mark.parametrize("fabric", EVERY_FABRIC)
@pytest.mark.parametrize("codec", ["none", "fp16", "int8", "topk:0.1", "powersgd:1", "onebit"])
@pytest.mark.parametrize(("mode", "memories"), [("sync", 1), ("delayed", 2), ("bounded:ahead=0", 1)])
def test_gradients_that_nobody_holds_stay_in_their_memory(mode: str, memories: int, codec: str, fabric: str) -> None:
    """An engine's thread may hold a tensor for a moment longer than the call takes."""
    most = memories + 2 * (fabric == "torch")
    for to_none in (True, False):
        found = on_ranks(partial(memory_over_passes, mode=mode, codec=codec, to_none=to_none), fabric)
        assert all(memories <= one <= most for one in found)


# A step that is skipped never happened

STEADY = ["none", "int8", "topk:0.1", "onebit", "powersgd:1", "dgc:0.1,warmup=0"]
DRAWING = [
    "int8:rounding=stochastic",
    "int4:rounding=stochastic",
    "topk:0.1,select=sampled",
    "randomk:0.2",
    "dgc:0.1,warmup=6",
    "warmup:steps=3,codec=(topk:0.1)",
]
SKIPPING = ["sync", "bounded:ahead=0,pull=none"]  # together


def with_a_step_skipped(fabric: syncline.Fabric, mode: str, codec: str, skipped: bool, steps: int = 8) -> Tensor:
    """The third step has a NaN on rank 1, or is left out by all."""
    model = fill(mlp(torch.float32, width=100), seed=0)  # wide enough for a sample
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, codec=codec, **SMALL_BUCKETS)
    for step in range(steps):
        if step == 2 and not skipped:
            continue
        factor = torch.nan if (fabric.rank, step) == (1, 2) else 1.0
        optimizer.zero_grad()
        (squared_in_single(model, Batch(fabric.rank, step)) * factor).backward()
        optimizer.step()
    sync.drain()
    sync.close()
    return place_of(model)


def assert_it_never_happened(mode: str, codec: str, fabric: str = "threads") -> None:
    found, never = (
        on_ranks(partial(with_a_step_skipped, mode=mode, codec=codec, skipped=skipped), fabric)
        for skipped in (True, False)
    )
    for one, other in zip(found, never, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("codec", STEADY)
@pytest.mark.parametrize("mode", SKIPPING)
def test_a_step_that_is_skipped_never_happened(mode: str, codec: str) -> None:
    assert_it_never_happened(mode, codec)


@pytest.mark.parametrize("codec", DRAWING)
@pytest.mark.parametrize("mode", SKIPPING)
def test_a_step_that_is_skipped_with_a_codec_that_counts_steps_never_happened(mode: str, codec: str) -> None:
    assert_it_never_happened(mode, codec)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
@pytest.mark.parametrize("mode", SKIPPING)
def test_a_step_that_is_skipped_never_happened_on_any_fabric(mode: str, fabric: str) -> None:
    assert_it_never_happened(mode, "int8:rounding=stochastic", fabric)


@pytest.mark.parametrize("mode", ["delayed:warmup=4", "local:every=3,warmup=4"])
def test_a_step_that_is_skipped_in_a_warm_up_of_its_mode_never_happened(mode: str) -> None:
    assert_it_never_happened(mode, "none")


# Delayed, clipped


def evaluating_alone(fabric: syncline.Fabric, clips: bool) -> list[Tensor]:
    """Rank 1 evaluates between two steps; where all are after the next ones."""
    model = fill(mlp(), seed=0)
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode="delayed", **SMALL_BUCKETS)
    path = []
    for step in range(6):
        optimizer.zero_grad()
        squared(model, Batch(fabric.rank, step)).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        path.append(place_of(model))
        if (fabric.rank, step) == (1, 2):
            model.eval()
            with torch.no_grad():
                squared(model, Batch(0, 0))
            model.train()
    sync.drain()
    sync.close()
    return [*path, place_of(model)]


def assert_they_stay_together(clips: bool, fabric: str = "threads") -> None:
    ranks = on_ranks(partial(evaluating_alone, clips=clips), fabric)
    for places in zip(*ranks, strict=True):
        assert same_bits(*places)


def test_a_rank_that_evaluates_alone_stays_with_the_others() -> None:
    assert_they_stay_together(clips=False)


@pytest.mark.parametrize("fabric", EVERY_FABRIC)
def test_a_rank_that_evaluates_alone_stays_with_others_that_clip(fabric: str) -> None:
    assert_they_stay_together(clips=True, fabric=fabric)
