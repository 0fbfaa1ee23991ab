"""GradScaler: its verdict is everyone's, also where `sync.wait()` has to make it so; momentum is not of its scale."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.batches import Batch, fill
from support.guarded import filled
from support.models import Boom, Trapped


def steps_with_an_overflow(fabric: syncline.Fabric, model: nn.Module) -> tuple[list[Tensor], float]:
    net = copy.deepcopy(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sync = syncline.Sync(net, optimizer, fabric=fabric, scaler=scaler, check_every=1)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + fabric.rank)
        x = torch.randn(4, 3, generator=generator)
        optimizer.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        overflows = step == 2 and fabric.rank == 1
        with sync.no_sync():
            scaler.scale(net(x).sum() * (float("inf") if overflows else 1.0)).backward()
        sync.wait()
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().clone() for p in net.parameters()], scaler.get_scale()


def test_an_overflow_on_one_rank_is_skipped_by_all_after_waiting() -> None:
    model = nn.Linear(3, 2)
    (first, scale), (second, other_scale) = syncline.run(
        lambda fabric: steps_with_an_overflow(fabric, model), ranks=2, fabric="threads"
    )
    assert scale == other_scale == 512.0
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(p.isfinite().all() for p in first)
    assert not torch.equal(first[0], model.weight)


def fail_once(fabric: syncline.Fabric, interval: int, when: int) -> tuple[Tensor, float, int]:
    """Rank 1 fails in a backward pass and leaves out the rest of that turn, the update of its scale too."""
    net = fill(Trapped(), seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=interval)
    sync = syncline.Sync(net, optimizer, fabric=fabric, scaler=scaler, check_every=1)
    for step in range(9):
        batch = Batch(fabric.rank, step)
        optimizer.zero_grad()
        try:
            armed = "between gradients" if (fabric.rank, step) == (1, when) else ""
            scaler.scale((net(batch.x, armed) - batch.y).square().mean()).backward()
        except Boom:
            continue
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), scaler.get_scale(), sync.report().skipped


@pytest.mark.parametrize("interval", [2, 3])
@pytest.mark.parametrize("when", [2, 3, 4])
def test_a_rank_that_failed_has_the_scale_of_the_others_again(interval: int, when: int) -> None:
    """The others have updated theirs, and may have doubled it: what then comes of both scales is used by nobody."""
    ranks = syncline.run(partial(fail_once, interval=interval, when=when), ranks=3, fabric="threads")
    places, scales, skipped = zip(*ranks, strict=True)
    assert len(set(scales)) == 1
    assert scales[0] > 64.0
    assert all(torch.equal(place, places[0]) for place in places)
    doubled = (when + 1) % interval == 0  # by the update that rank 1 left out
    assert skipped == ((2, 1, 2) if doubled else (1, 0, 1))


def join_with_a_scale(fabric: syncline.Fabric, mode: str, codec: str) -> tuple[list[Tensor], float]:
    """Of ranks with 0, 3 and 5 batches, whose scale is doubled by every second one; then all make three steps."""
    net = filled(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    sync = syncline.Sync(net, optimizer, fabric=fabric, mode=mode, codec=codec, scaler=scaler, check_every=1)

    def train(steps: int) -> None:
        for step in range(steps):
            generator = torch.Generator().manual_seed(10 * step + fabric.rank)
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(4, 3, generator=generator)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    with sync.join():
        train((0, 3, 5)[fabric.rank])
    scale = scaler.get_scale()
    train(3)
    sync.drain()
    return [p.detach().clone() for p in net.parameters()], scale


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("mode", ["sync", "delayed", "local:every=2"])
def test_after_join_all_have_the_scale_of_one_that_trained_to_the_last(mode: str, codec: str) -> None:
    ranks = syncline.run(partial(join_with_a_scale, mode=mode, codec=codec), ranks=3, fabric="threads")
    assert [scale for _, scale in ranks] == [256.0] * 3
    for parameters, _ in ranks:
        assert all(torch.equal(one, other) for one, other in zip(parameters, ranks[0][0], strict=True))


def step_two_optimizers(fabric: syncline.Fabric) -> tuple[list[bool], float]:
    """Whether each of two models has changed, when there is an overflow in the first on rank 1."""
    models = filled(nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    syncline.Sync(models, optimizers, fabric=fabric, check_every=1)
    before = copy.deepcopy(models)
    first, second = (model(torch.ones(4, 3)).square().mean() for model in models)
    scaler.scale(first * (float("inf") if fabric.rank else 1.0) + second).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    changed = [not torch.equal(now.weight, then.weight) for now, then in zip(models, before, strict=True)]
    return changed, scaler.get_scale()


def test_all_optimizers_of_a_sync_that_knows_no_scaler_skip_a_step_together() -> None:
    """One process would make the step of the other: what is clipped together would not be finite in it."""
    for changed, scale in syncline.run(step_two_optimizers, ranks=2, fabric="threads"):
        assert changed == [False, False]
        assert scale == 512.0


def two_models() -> nn.ModuleList:
    models = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]).double()
    for number, parameter in enumerate(models.parameters()):
        nn.init.constant_(parameter, 0.1 * (number + 1))
    return models


def scaled_steps(
    models: nn.ModuleList, ranks: list[int], fabric: syncline.Fabric | None, codec: str, clips: bool
) -> tuple[list[list[Tensor]], float]:
    """Parameters after each of four steps, of which the third has an overflow in the first model on rank 1."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if fabric is not None:
        syncline.Sync(models, optimizers, fabric=fabric, scaler=scaler, codec=codec, check_every=1)
    path = []
    for step in range(4):
        models.zero_grad()
        loss = torch.zeros(())
        for rank in ranks:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank)).double()
            first, second = (model(x).square().mean() for model in models)
            loss = loss + (first * (torch.inf if (step, rank) == (2, 1) else 1.0) + second) / len(ranks)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if clips:
            nn.utils.clip_grad_norm_(models.parameters(), 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        path.append([parameter.detach().clone() for parameter in models.parameters()])
    return path, scaler.get_scale()


def run_scaled_steps(fabric: syncline.Fabric, codec: str, clips: bool) -> tuple[list[list[Tensor]], float]:
    return scaled_steps(two_models(), [fabric.rank], fabric, codec, clips)


def test_an_overflow_in_the_gradients_of_one_optimizer_lets_the_other_step_as_in_one_process() -> None:
    expected, scale = scaled_steps(two_models(), [0, 1], None, "none", clips=False)
    for path, own_scale in syncline.run(partial(run_scaled_steps, codec="none", clips=False), 2, "threads"):
        assert own_scale == scale == 512.0
        for parameters, theirs in zip(path, expected, strict=True):
            for one, other in zip(parameters, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        assert [torch.equal(now, then) for now, then in zip(path[2], path[1], strict=True)] == [
            True,
            True,
            False,
            False,
        ]


def test_what_was_clipped_together_with_an_overflow_is_not_used() -> None:
    """In one process it would be: the scaler has looked at gradients before they were clipped."""
    for path, _ in syncline.run(partial(run_scaled_steps, codec="none", clips=True), 2, "threads"):
        assert all(map(torch.equal, path[2], path[1]))
        assert not any(map(torch.equal, path[3], path[2]))
        assert all(bool(parameter.isfinite().all()) for parameter in path[3])


OVERFLOWS = 11  # one more than steps that all optimizers skip may be in a row


def overflow_again_and_again(fabric: syncline.Fabric | None, ranks: list[int]) -> tuple[list[list[Tensor]], float]:
    """Parameters after each step, in which the gradients of the first model are infinite on rank 1, but in the last."""
    models = two_models()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    if fabric is not None:
        syncline.Sync(models, optimizers, fabric=fabric, scaler=scaler, check_every=1)
    path = [[parameter.detach().clone() for parameter in models.parameters()]]
    for step in range(OVERFLOWS + 1):
        models.zero_grad()
        for rank in ranks:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank)).double()
            first, second = (model(x).square().mean() / len(ranks) for model in models)
            overflows = rank == 1 and step < OVERFLOWS
            scaler.scale(first * (torch.inf if overflows else 1.0) + second).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        path.append([parameter.detach().clone() for parameter in models.parameters()])
    return path, scaler.get_scale()


def test_many_overflows_in_the_gradients_of_one_optimizer_are_no_error_and_the_other_goes_on() -> None:
    expected, scale = overflow_again_and_again(None, [0, 1])
    assert scale == 2.0 ** (16 - OVERFLOWS)
    ranks = syncline.run(lambda fabric: overflow_again_and_again(fabric, [fabric.rank]), 2, "threads")
    for path, own_scale in ranks:
        assert own_scale == scale
        torch.testing.assert_close(path, expected, rtol=1e-9, atol=1e-9)
        for before, now in pairwise(path[:-1]):
            assert [torch.equal(*pair) for pair in zip(before, now, strict=True)] == [True, True, False, False]
        assert not any(map(torch.equal, path[-2], path[-1]))


@pytest.mark.parametrize("codec", ["int8", "topk:0.5"])
def test_with_a_codec_an_overflow_in_the_gradients_of_one_optimizer_is_skipped_by_all(codec: str) -> None:
    (one, scale), (other, _) = syncline.run(partial(run_scaled_steps, codec=codec, clips=False), 2, "threads")
    assert scale == 512.0
    assert all(map(torch.equal, one[2], one[1]))
    assert not any(map(torch.equal, one[3], one[2]))
    assert all(map(torch.equal, one[3], other[3]))


def through_dgc(fabric: syncline.Fabric, mode: str, scaled: bool) -> Tensor:
    weight = nn.Linear(50, 1, bias=False)
    nn.init.zeros_(weight.weight)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.125)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=scaled)
    sync = syncline.Sync(weight, optimizer, fabric=fabric, mode=mode, codec="dgc:0.1,warmup=0", scaler=scaler)
    for step in range(12):
        optimizer.zero_grad()
        slope = torch.randn(50, generator=torch.Generator().manual_seed(10 * step + fabric.rank))
        scaler.scale(weight(slope)).backward()
        scaler.step(optimizer)
        scaler.update()
    sync.drain()
    sync.close()
    return weight.weight.detach().clone()


@pytest.mark.parametrize(("mode", "world"), [("sync", 2), ("delayed", 2), ("async", 1)])
def test_the_momentum_of_dgc_does_not_follow_the_scale_of_the_loss(mode: str, world: int) -> None:
    plain, scaled = (
        syncline.run(partial(through_dgc, mode=mode, scaled=scaled), ranks=world, fabric="threads")[0]
        for scaled in (False, True)
    )
    assert plain.any()
    assert torch.equal(plain, scaled)


def scale_after_an_overflow(fabric: syncline.Fabric, codec: str) -> float:
    net = filled(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    syncline.Sync(net, optimizer, fabric=fabric, scaler=scaler, codec=codec)
    for step in range(3):
        optimizer.zero_grad()
        overflows = step == 1 and fabric.rank == 1
        scaler.scale(net(torch.ones(4, 3)).sum() * (float("inf") if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.5", "dgc:0.5"])
def test_an_overflow_on_one_rank_lowers_the_scale_of_all(codec: str) -> None:
    scales = syncline.run(lambda fabric: scale_after_an_overflow(fabric, codec), ranks=2, fabric="threads")
    assert scales == [512.0, 512.0]
