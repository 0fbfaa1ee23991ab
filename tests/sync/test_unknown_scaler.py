"""A GradScaler that Sync was not given is refused where ranks would come apart; one that it was given is watched."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW

import syncline
from support.batches import Batch, fill
from support.catalogue import PROCESS_FABRICS
from support.models import Boom, Trapped, mlp
from support.weights import assert_close
from syncline.errors import ConfigError, FabricError
from syncline.fabric.base import Fabric

WORLD, STEPS = 2, 6
DEADLINES = syncline.Deadlines(20.0, join=60.0)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    batch = Batch(rank, step)
    return (model(batch.x) - batch.y).square().mean()


def train_with_unknown(fabric: Fabric, mode: str, codec: str, given: str) -> tuple[str, dict[str, Tensor], bool]:
    """What is said in the first step with a scaler that Sync was not given, or was given another one instead of."""
    model = fill(mlp(torch.float32), fabric.rank)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=64.0, enabled=given != "disabled")
    another = GradScaler("cpu", init_scale=64.0) if given == "another" else None
    syncline.Sync(model, optimizer, fabric=fabric, mode=mode, codec=codec, scaler=another)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    said = ""
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = Batch(fabric.rank, step)
            scaler.scale((model(batch.x.float()) - batch.y.float()).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    except ConfigError as error:
        said = str(error)
    return said, dict(model.state_dict()), all(map(torch.equal, before, model.parameters()))


REFUSED = {
    "delayed": "the gradients of the step before have the scale of the step before",
    "local:every=2": "a step that it leaves out on one rank must count there",
    "slowmo:every=2": "a step that it leaves out on one rank must count there",
    "diloco:every=2": "a step that it leaves out on one rank must count there",
}


def in_all(mode: str, codec: str, given: str = "", fabric: str = "threads") -> list[tuple]:
    return syncline.run(partial(train_with_unknown, mode=mode, codec=codec, given=given), WORLD, fabric, DEADLINES)


@pytest.mark.parametrize("mode", REFUSED)
def test_a_scaler_that_sync_was_not_given_is_refused_in_its_first_step(mode: str) -> None:
    for said, _, stayed in in_all(mode, "none"):
        assert REFUSED[mode] in said
        assert "scaler=scaler" in said
        assert stayed


@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_it_is_refused_in_processes(fabric: str) -> None:
    for said, _, stayed in in_all("local:every=2", "none", fabric=fabric):
        assert REFUSED["local:every=2"] in said
        assert stayed


@pytest.mark.parametrize("codec", ["topk:0.5", "int8", "dgc", "fp16:feedback=true"])
def test_it_is_refused_by_codecs_with_a_residual(codec: str) -> None:
    for said, _, stayed in in_all("sync", codec):
        assert "the residual of" in said
        assert stayed


@pytest.mark.parametrize(("mode", "codec"), [("sync", "none"), ("sync", "bf16"), ("async", "none")])
def test_it_is_no_error_where_a_scaler_does_nothing_alone(mode: str, codec: str) -> None:
    for said, _, stayed in in_all(mode, codec):
        assert not said or mode == "async"  # servers want gradients that are unscaled
        assert not stayed or mode == "async"


@pytest.mark.parametrize("mode", ["sync", *REFUSED])
def test_a_scaler_that_is_disabled_is_no_scaler(mode: str) -> None:
    for said, _, stayed in in_all(mode, "none", given="disabled"):
        assert not said
        assert not stayed


@pytest.mark.parametrize("mode", ["sync", "local:every=2"])
def test_another_scaler_than_the_one_that_was_given_is_refused(mode: str) -> None:
    for said, _, stayed in in_all(mode, "none", given="another"):
        assert "this Sync was given another one" in said
        assert stayed


def fail_once(fabric: Fabric) -> tuple[str, float, Tensor]:
    """Rank 1 fails in a backward pass and goes on with the next batch; nobody was given the scaler."""
    net = fill(Trapped(), seed=0)
    optimizer = SGD(net.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
    sync = syncline.Sync(net, optimizer, fabric=fabric)
    said = ""
    for step in range(4):
        optimizer.zero_grad()
        batch = Batch(fabric.rank, step)
        try:
            armed = "between gradients" if (fabric.rank, step) == (1, 1) else ""
            scaler.scale((net(batch.x, armed) - batch.y).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        except Boom:
            continue
        except (ConfigError, FabricError) as error:
            said = str(error)
            break
    sync.close()
    return said, scaler.get_scale(), torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("fabric", ["threads", *PROCESS_FABRICS])
def test_a_rank_that_fails_with_a_scaler_that_nobody_knows_stops_the_others_before_they_step(fabric: str) -> None:
    (said, _, place), (_, _, other) = syncline.run(fail_once, WORLD, fabric, DEADLINES)
    assert "a rank that failed in its backward pass has not updated its scale as the others have" in said
    assert torch.equal(place, other)


# A rank without a backward pass


def leave_out_a_backward(fabric: Fabric, mode: str, unscales: bool, fused: bool) -> tuple[dict[str, Tensor], float]:
    """Rank 1 has no batch in one step, and steps all the same."""
    model = fill(mlp(), fabric.rank)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, scaler=scaler, check_every=1)
    for step in range(STEPS):
        optimizer.zero_grad()
        if (fabric.rank, step) != (1, 3):
            scaler.scale(loss_of(model, fabric.rank, step)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    sync.drain()
    return dict(model.state_dict()), scaler.get_scale()


def in_one_process(unscales: bool) -> dict[str, Tensor]:
    model = fill(mlp(), 0)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            if (rank, step) != (1, 3):
                (loss_of(model, rank, step) / WORLD).backward()
        if unscales:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("fabric", ["threads", *PROCESS_FABRICS])
@pytest.mark.parametrize(("unscales", "fused"), [(False, False), (True, False), (False, True)])
def test_a_rank_without_a_backward_pass_gets_means_before_its_scaler_looks(
    fabric: str, unscales: bool, fused: bool
) -> None:
    work = partial(leave_out_a_backward, mode="sync", unscales=unscales, fused=fused)
    ranks = syncline.run(work, WORLD, fabric, DEADLINES)
    for parameters, scale in ranks:
        assert_close(parameters, in_one_process(unscales), 1e-9)
        assert scale == 64.0 * 2 ** (STEPS // 2)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_rank_without_a_backward_pass_stays_with_the_others_in_delayed(unscales: bool) -> None:
    work = partial(leave_out_a_backward, mode="delayed", unscales=unscales, fused=False)
    (one, scale), (other, other_scale) = syncline.run(work, WORLD, "threads", DEADLINES)
    assert scale == other_scale
    assert all(torch.equal(one[name], other[name]) for name in one)


# Several Syncs, and copies


def share_a_scaler(fabric: Fabric, mode: str, together: bool) -> list[dict[str, Tensor]]:
    """Two models with a scaler each, or with one; whose class is its own again when all is closed."""
    models = [fill(mlp(), seed) for seed in (1, 2)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    scalers = [GradScaler("cpu", init_scale=64.0) for _ in models]
    if together:
        scalers[1] = scalers[0]
    syncs = [
        syncline.Sync(model, optimizer, fabric=fabric, mode=mode, scaler=scaler)
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True)
    ]
    for step in range(STEPS):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, fabric.rank, step)).backward()
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.step(optimizer)
        for scaler in dict.fromkeys(scalers):
            scaler.update()
    for sync in syncs:
        sync.drain()
    for sync in syncs:
        assert type(scalers[0]) is not GradScaler or sync is not syncs[0]
        sync.close()
    assert type(scalers[0]) is GradScaler
    return [dict(model.state_dict()) for model in models]


@pytest.mark.parametrize("mode", ["sync", "delayed", "local:every=2", "diloco:every=3"])
def test_two_syncs_may_have_one_scaler(mode: str) -> None:
    apart = syncline.run(partial(share_a_scaler, mode=mode, together=False), WORLD, "threads", DEADLINES)
    together = syncline.run(partial(share_a_scaler, mode=mode, together=True), WORLD, "threads", DEADLINES)
    for mine, theirs in zip(together, apart, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert_close(one, other, 1e-12)


def copy_a_scaler(fabric: Fabric) -> list[tuple[bool, float]]:
    model = fill(mlp(), 0)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0)
    syncline.Sync(model, optimizer, fabric=fabric, mode="local:every=1", scaler=scaler)
    copies = [copy.copy(scaler), copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))]
    return [(type(one) is GradScaler, one.get_scale()) for one in copies] + [(isinstance(scaler, GradScaler), 64.0)]


def test_copies_of_a_watched_scaler_are_plain_ones() -> None:
    assert syncline.run(copy_a_scaler, WORLD, "threads") == [[(True, 64.0)] * 4] * WORLD
