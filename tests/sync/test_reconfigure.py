"""`Sync.reconfigure`: a run goes on with other settings as if it had been saved and restored with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import syncline
from support.batches import fill
from support.catalogue import PROCESS_FABRICS
from support.on_a_line import RATE, START, Line, slope_of
from support.references import same_bits
from support.trainees import ADAM, DEADLINES, PLAIN, SMALL_BUCKETS, Trainee, checkpoint_of, place_of, restore
from syncline.errors import ConfigError, Desync, LayoutMismatch, RankFailed

STEPS = 5
CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"bucket_bytes": 512}),
    ({}, {"collective": "ring"}),
    ({}, {"codec": "topk:0.3"}),
    ({"codec": "topk:0.3"}, {"codec": "none"}),
    ({"codec": "topk:0.3"}, {"codec": "fp16"}),
    ({"codec": "topk:0.3"}, {"codec": "int8", "bucket_bytes": 512}),
    ({"codec": "topk:0.3"}, {"bucket_bytes": 512}),
    ({"codec": "powersgd:2"}, {"codec": "powersgd:1"}),
    ({"codec": "powersgd:2"}, {"bucket_bytes": 512}),
    ({"codec": "dgc:0.3,warmup=0"}, {"codec": "onebit"}),
    ({"codec": "int8:rounding=stochastic"}, {"codec": "randomk:0.3"}),
    ({}, {"mode": "delayed"}),
    ({}, {"mode": "delayed:warmup=2"}),
    ({"mode": "delayed"}, {"mode": "sync"}),
    ({"mode": "delayed"}, {"bucket_bytes": 512}),
    ({"mode": "delayed", "codec": "topk:0.3"}, {"bucket_bytes": 512}),
    ({"mode": "delayed", "codec": "topk:0.3"}, {"codec": "none"}),
    ({"mode": "delayed", "codec": "topk:0.3"}, {"mode": "sync", "codec": "int8"}),
    ({"codec": "topk:0.3"}, {"mode": "local:every=2"}),
    ({"codec": "topk:0.3"}, {"mode": "local:every=2", "codec": "none"}),
    ({"codec": "topk:0.3"}, {"mode": "diloco:every=3,warmup=2"}),
    ({"mode": "local:every=4"}, {"mode": "local:every=2"}),
    ({"mode": "local:every=4"}, {"bucket_bytes": 512}),
    ({"mode": "local:every=8,warmup=8"}, {"bucket_bytes": 512}),
    ({"mode": "local:every=4", "codec": "topk:0.3"}, {"codec": "none"}),
    ({"mode": "local:every=4"}, {"codec": "topk:0.3"}),
    ({"mode": "local:every=3,warmup=8", "codec": "topk:0.3"}, {"codec": "int8"}),
    ({"mode": "diloco:every=4", "codec": "topk:0.3"}, {"mode": "sync"}),
    ({"mode": "diloco:every=4"}, {"mode": "diloco:every=2"}),
    ({"mode": "diloco:every=8,fragments=2,delay=2,merge=0.5"}, {"bucket_bytes": 512}),
    ({"mode": "slowmo:every=4"}, {"mode": "delayed"}),
]


def named(change: tuple[dict[str, Any], dict[str, Any]]) -> str:
    return " to ".join(",".join(f"{name}={value}" for name, value in side.items()) or "sync" for side in change)


def reconfigured(fabric: syncline.Fabric, before: dict[str, Any], change: dict[str, Any]) -> list[Tensor]:
    trainee = Trainee(fabric, optimizer=ADAM, **({"mode": "sync"} | before))
    trainee.train(STEPS)
    trainee.sync.reconfigure(**change)
    return [*trainee.train(STEPS), trainee.drained()]


def saved_and_restored(fabric: syncline.Fabric, before: dict[str, Any], change: dict[str, Any]) -> list[Tensor]:
    first = Trainee(fabric, optimizer=ADAM, **({"mode": "sync"} | before))
    first.train(STEPS)
    saved = checkpoint_of(first)
    first.sync.close()
    again = Trainee(fabric, optimizer=ADAM, **({"mode": "sync"} | before | change))
    restore(again, saved, done=STEPS)
    return [*again.train(STEPS), again.drained()]


@pytest.mark.parametrize("change", CHANGES, ids=named)
@pytest.mark.parametrize("world", [2, 3])
def test_it_equals_a_run_that_was_saved_and_restored_with_those_settings(
    change: tuple[dict[str, Any], dict[str, Any]], world: int
) -> None:
    before, after = change
    one = syncline.run(partial(reconfigured, before=before, change=after), world, "threads", DEADLINES)
    other = syncline.run(partial(saved_and_restored, before=before, change=after), world, "threads", DEADLINES)
    for mine, theirs in zip(one, other, strict=True):
        assert [same_bits(a, b) for a, b in zip(mine, theirs, strict=True)] == [True] * (STEPS + 1)
    assert all(same_bits(rank[-1], one[0][-1]) for rank in one)  # replicas are equal after drain()


def test_the_warmup_of_a_new_mode_begins_where_the_mode_does() -> None:
    def places(fabric: syncline.Fabric) -> list[Tensor]:
        trainee = Trainee(fabric, "sync", PLAIN)
        trainee.train(STEPS)
        trainee.sync.reconfigure(mode="delayed:warmup=2")
        return trainee.train(4)

    for one, two, three, four in syncline.run(places, 2, "threads", DEADLINES):
        assert not same_bits(one, two)  # means are used at once
        assert same_bits(two, three)  # the first one that is late has nothing to step with
        assert not same_bits(three, four)


@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_processes_reconfigure(fabric: str) -> None:
    before, after = {"codec": "int8"}, {"mode": "delayed", "codec": "topk:0.3", "bucket_bytes": 512}
    one = syncline.run(partial(reconfigured, before=before, change=after), 2, fabric, DEADLINES)
    other = syncline.run(partial(reconfigured, before=before, change=after), 2, "threads", DEADLINES)
    for mine, theirs in zip(one, other, strict=True):
        assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))


def test_in_a_world_of_one_it_changes_what_would_be_done() -> None:
    with syncline.init() as fabric:
        trainee = Trainee(fabric, "sync", PLAIN)
        trainee.train(1)
        trainee.sync.reconfigure(mode="delayed")
        before = trainee.place()
        assert same_bits(trainee.step(), before)  # nothing has arrived yet
        assert not same_bits(trainee.step(), before)


# What was sent plus what is kept is the gradient


def walked(fabric: syncline.Fabric, mode: str, then: dict[str, Any], steps: int) -> tuple[Tensor, Tensor]:
    """How far parameters have gone in units of a step, and the residual at the end in the same units."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, codec="topk:0.34")
    for step in range(2 * steps):
        if step == steps:
            sync.reconfigure(**then)
        optimizer.zero_grad()
        model(slope_of(fabric.rank)).backward()
        optimizer.step()
    sync.drain()
    state = sync.state_dict()["codec_state"]
    kept = torch.zeros_like(place_of(model))
    if state.get("residual"):
        names = [name for name, _ in model.named_parameters()]
        kept = torch.cat([state["residual"][name].double().flatten() * state["step_scale"][name] for name in names])
    sync.close()
    return START - place_of(model), kept


@pytest.mark.parametrize(
    ("mode", "then"),
    [
        ("sync", {"codec": "none"}),
        ("sync", {"codec": "int8"}),
        ("sync", {"codec": "topk:0.67"}),
        ("sync", {"mode": "local:every=2"}),
        ("sync", {"mode": "local:every=2", "codec": "none"}),
        ("delayed", {"codec": "none"}),
        ("local:every=2", {"codec": "none"}),
        ("local:every=2", {"mode": "sync"}),
        ("local:every=2", {"mode": "sync", "codec": "none"}),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_nothing_is_lost(mode: str, then: dict[str, Any], world: int) -> None:
    """Of constant gradients all is either stepped with or in the residual."""
    steps = 6
    ranks = syncline.run(partial(walked, mode=mode, then=then, steps=steps), world, "threads", DEADLINES)
    mean = sum(map(slope_of, range(world))) / world
    for gone, _ in ranks:
        kept = torch.stack([residual for _, residual in ranks]).mean(0)
        whole = torch.full_like(gone, RATE * mean * 2 * steps)
        torch.testing.assert_close(gone + kept, whole, rtol=1e-5, atol=1e-5)
    if then.get("codec") == "none":
        assert not any(residual.any() for _, residual in ranks)


def test_residuals_that_are_sent_densely_wait_for_a_pass_that_is_good() -> None:
    """A NaN in the first pass after it skips that step, and nothing of the residual is lost."""

    def work(fabric: syncline.Fabric, with_nan: bool) -> Tensor:
        trainee = Trainee(fabric, "sync", PLAIN, codec="topk:0.3")
        trainee.train(3)
        trainee.sync.reconfigure(codec="none")
        if with_nan:
            trainee.step(torch.nan if fabric.rank else 1.0)
            trainee.done -= 1
        return torch.stack(trainee.train(3))

    with_nan, without = (
        syncline.run(partial(work, with_nan=with_nan), 2, "threads", DEADLINES) for with_nan in (True, False)
    )
    assert same_bits(with_nan[0], without[0])
    assert same_bits(with_nan[0], with_nan[1])


# Refusals


def refused(work: Callable[[syncline.Fabric], object], kind: type[Exception], match: str, world: int = 2) -> None:
    with pytest.raises(RankFailed, match=match) as caught:
        syncline.run(work, world, "threads", DEADLINES)
    assert {type(error) for error in caught.value.failures.values()} == {kind}
    assert len(caught.value.failures) == world


@pytest.mark.parametrize(("mode", "wanted"), [("sync", "async"), ("async", "sync"), ("delayed", "bounded:ahead=1")])
def test_modes_with_servers_are_refused(mode: str, wanted: str) -> None:
    def work(fabric: syncline.Fabric) -> None:
        trainee = Trainee(fabric, mode)
        trainee.train(2)
        try:
            trainee.sync.reconfigure(mode=wanted)
        finally:
            trainee.train(1)  # it goes on as before
            trainee.sync.close()

    refused(work, ConfigError, "servers")


def test_ranks_that_want_different_settings_are_told() -> None:
    def work(fabric: syncline.Fabric) -> None:
        trainee = Trainee(fabric, "sync")
        trainee.train(2)
        trainee.sync.reconfigure(codec=("int8", "topk:0.1")[fabric.rank])

    refused(work, LayoutMismatch, "topk")


@pytest.mark.parametrize("mode", ["sync", "local:every=3"])
def test_a_rank_that_reconfigures_alone_is_named_before_anything_is_used(mode: str) -> None:
    def work(fabric: syncline.Fabric) -> None:
        trainee = Trainee(fabric, mode)
        trainee.train(2)
        before = trainee.place()
        try:
            if fabric.rank == 1:
                trainee.sync.reconfigure(codec="int8")
            trainee.train(1)
        except Desync:
            assert mode != "sync" or same_bits(trainee.place(), before)
            raise

    refused(work, Desync, r"rank 1 calls reconfigure\(\)")


def test_gradients_that_no_step_has_used_are_not_lost() -> None:
    def work(fabric: syncline.Fabric) -> None:
        trainee = Trainee(fabric, "sync")
        trainee.train(2)
        trainee.optimizer.zero_grad()
        trainee.backward()
        trainee.sync.reconfigure(codec="int8")

    refused(work, ConfigError, "no step has used")


@pytest.mark.parametrize(
    ("change", "match"), [({"codec": "topk9"}, "topk9"), ({"collective": "rink"}, "ring"), ({"bucket_bytes": 0}, "0")]
)
def test_settings_that_are_wrong_are_refused_and_the_run_goes_on(change: dict[str, Any], match: str) -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "sync")
        trainee.train(2)
        with pytest.raises(ConfigError, match=match):
            trainee.sync.reconfigure(**change)
        return trainee.step()

    ranks = syncline.run(work, 2, "threads", DEADLINES)
    assert same_bits(*ranks)


def test_a_closed_sync_is_not_reconfigured() -> None:
    with syncline.init() as fabric:
        trainee = Trainee(fabric, "sync")
        trainee.sync.close()
        with pytest.raises(ConfigError, match="closed"):
            trainee.sync.reconfigure(codec="int8")


def test_it_may_happen_before_the_first_pass_and_many_times() -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        model = fill(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), seed=0)
        optimizer = SGD(model.parameters(), lr=0.1)
        sync = syncline.Sync(model, optimizer, fabric=fabric, **SMALL_BUCKETS)
        places = []
        for step, codec in enumerate(("int8", "topk:0.3", "none", "powersgd:1", "none", "fp16")):
            sync.reconfigure(codec=codec)
            optimizer.zero_grad()
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + fabric.rank))
            model(inputs).square().sum().backward()
            optimizer.step()
            places.append(place_of(model))
        sync.close()
        return places

    for places in zip(*syncline.run(work, 3, "threads", DEADLINES), strict=True):
        assert all(same_bits(place, places[0]) for place in places)
