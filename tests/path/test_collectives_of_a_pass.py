"""How many collectives a pass of B buckets takes over an engine: one or two a bucket, and one status."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import syncline
from support.guarded import filled
from syncline.path.answerer import FlatAnswerer
from syncline.path.coded import CodedPath

STEPS = 4
ONE_ROUND = ["none", "fp16", "bf16", "topk:0.1", "topk:0.1,select=sampled", "dgc:0.1,warmup=0", "randomk:0.2"]
TWO_ROUNDS = ["int8", "int4", "onebit", "powersgd:1", "fp16:feedback=true"]


def count(fabric: syncline.Fabric, codec: str) -> tuple[int, int, int]:
    """Buckets, and the collectives of data and of the status in each pass after the first."""
    model = filled(nn.Sequential(*(nn.Linear(30, 30) for _ in range(4))), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, bucket_bytes=1000, first_bucket_bytes=1000)
    path, counts = sync.reducer.path, []
    answerer = path.answerer if isinstance(path, CodedPath) else None
    others = list(answerer.channels) if isinstance(answerer, FlatAnswerer) else []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(3, 30, generator=torch.Generator().manual_seed(10 * step + fabric.rank))).sum().backward()
        optimizer.step()
        counts.append(sum(channel.started.total() for channel in (path.channel, *others)))
    each = {after - before for before, after in pairwise(counts)}
    assert len(each) == 1
    buckets = len(sync.buckets)
    sync.close()
    return buckets, each.pop(), sync.fabric.transport.call_count


@pytest.mark.parametrize(("codec", "rounds"), [*((c, 1) for c in ONE_ROUND), *((c, 2) for c in TWO_ROUNDS)])
def test_a_pass_takes_a_collective_for_each_question_of_a_bucket_and_one_for_the_status(
    codec: str, rounds: int
) -> None:
    for buckets, collectives, _ in syncline.run(partial(count, codec=codec), 2, "torch"):
        assert buckets > 3
        assert collectives == rounds * buckets + 1


def test_nothing_else_is_called_on_the_fabric_in_a_pass() -> None:
    """What is compared between ranks is compared when a Sync is made, and not call by call."""
    for calls in (syncline.run(partial(calls_between, steps=steps), 2, "threads") for steps in (2, 6)):
        assert set(calls) == {0}


def calls_between(fabric: syncline.Fabric, steps: int) -> int:
    """Calls of the fabric of a Sync in its passes after the first, beside those of its channel."""
    model = filled(nn.Linear(30, 30), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, divergence_guard=False)
    for step in range(steps + 1):
        if step == 1:
            before, started = sync.fabric.transport.call_count, sync.reducer.path.channel.started.total()
        optimizer.zero_grad()
        model(torch.full((3, 30), float(fabric.rank + 1))).sum().backward()
        optimizer.step()
    others = sync.fabric.transport.call_count - before - (sync.reducer.path.channel.started.total() - started)
    sync.close()
    return others


def opens_nothing_late(fabric: syncline.Fabric, codec: str) -> int:
    """Steps of a Sync whose channels cannot open another one."""
    model = filled(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 4)), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, bucket_bytes=1000, first_bucket_bytes=1000)
    path = sync.reducer.path
    channels = [path.channel, *(path.answerer.channels if isinstance(path, CodedPath) else [])]
    for channel in channels:
        channel.open_channel = None
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((3, 30), float(fabric.rank + step))).sum().backward()
        optimizer.step()
    sync.close()
    return len(sync.recorder.steps)


@pytest.mark.parametrize("codec", [*ONE_ROUND, *TWO_ROUNDS, "rules:codec=fp16,below=40", "warmup:steps=1,codec=fp16"])
def test_all_channels_of_a_sync_are_opened_in_its_constructor(codec: str) -> None:
    assert syncline.run(partial(opens_nothing_late, codec=codec), 2, "torch") == [3, 3]
