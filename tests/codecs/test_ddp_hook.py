"""Codecs for plain DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.errors import ConfigError
from syncline.integrations.ddp import CodecHook, attach

CODECS = ("none", "fp16", "int8", "onebit", "topk:0.1", "randomk:0.2", "powersgd:2")


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 10, generator=torch.Generator().manual_seed(100 * step + rank))


def train(codec: str, rank: int, steps: int = 8, interrupted: int = 0, bad: int = -1) -> list[Tensor]:
    model = net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hook = attach(ddp, codec, optimizer)
    kept_before: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = ddp(batch(step, rank)).square().mean()
        if step == bad and rank == 1:
            loss = loss * float("nan")
        if step == bad:
            kept_before = residuals_of(hook)
        loss.backward()
        if step == bad:
            assert all(parameter.grad.isnan().any() for parameter in model.parameters())
            assert all(torch.equal(kept_before[name], kept) for name, kept in residuals_of(hook).items())
            continue
        optimizer.step()
        if step + 1 == interrupted:
            saved = hook.state_dict()
            nothing = {kind: {key: 0 * value for key, value in of.items()} for kind, of in saved["codec_state"].items()}
            hook.load_state_dict(saved | {"codec_state": nothing})
            assert not any(residual.any() for residual in residuals_of(hook).values())
            hook.load_state_dict(saved)
    hook.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def residuals_of(hook: CodecHook) -> dict[str, Tensor]:
    """What the hook has kept, by parameter."""
    return hook.state_dict()["codec_state"]["residual"]


def all_of_them(fabric: syncline.Fabric) -> dict[str, list[Tensor]]:
    found = {codec: train(codec, fabric.rank) for codec in CODECS}
    found["interrupted"] = train("topk:0.1", fabric.rank, interrupted=3)
    found["with a bad step"] = train("topk:0.1", fabric.rank, bad=4)
    return found


@pytest.mark.timeout(120)
def test_ddp_trains_through_every_codec_and_its_ranks_stay_equal() -> None:
    first, second = syncline.run(all_of_them, ranks=2, fabric="torch")
    for codec in first:
        assert all(torch.equal(one, other) for one, other in zip(first[codec], second[codec], strict=True)), codec
    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(8):
        optimizer.zero_grad()
        alone(torch.cat([batch(step, 0), batch(step, 1)])).square().mean().backward()
        optimizer.step()
    exact = [parameter.detach() for parameter in alone.parameters()]
    torch.testing.assert_close(first["none"], exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first["fp16"], exact, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(first["int8"], exact, rtol=1e-1, atol=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(first["topk:0.1"], first["interrupted"], strict=True))
    assert not torch.equal(first["topk:0.1"][0], first["none"][0])


def resumed(fabric: syncline.Fabric, codec: str, at: int) -> tuple[list[Tensor], list[list[list[str]]]]:
    """Weights of a training of 6 steps that was saved at one of them and went on with everything new, and its buckets.

    Nothing is saved at step 0.
    """
    saved: dict[str, dict[str, object]] = {}
    buckets = []
    for steps in (range(at), range(at, 6)):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
        hook = attach(ddp, codec, optimizer)
        if saved:
            model.load_state_dict(saved["model"])
            hook.load_state_dict(saved["hook"])
        for step in steps:
            optimizer.zero_grad()
            ddp(batch(step, fabric.rank)).square().mean().backward()
            optimizer.step()
            buckets.append(hook.buckets)
        saved = {"model": copy.deepcopy(model.state_dict()), "hook": copy.deepcopy(hook.state_dict())} if at else {}
        hook.close()
    return [parameter.detach().clone() for parameter in model.parameters()], buckets


@pytest.mark.timeout(120)
@pytest.mark.parametrize("codec", ["topk:0.1", "onebit", "powersgd:2"])
def test_a_new_ddp_with_a_new_hook_goes_on_bit_for_bit(codec: str) -> None:
    whole, buckets = syncline.run(partial(resumed, codec=codec, at=0), ranks=2, fabric="torch")[0]
    for weights, buckets_of_both in syncline.run(partial(resumed, codec=codec, at=3), ranks=2, fabric="torch"):
        assert all(torch.equal(one, other) for one, other in zip(whole, weights, strict=True))
        assert buckets_of_both[3] == buckets[0] != buckets[3]  # a new DDP begins with other buckets
        assert buckets_of_both[4] == buckets[4]


def refuse(fabric: syncline.Fabric, other: nn.Module) -> str:
    with pytest.raises(ConfigError) as caught:
        attach(other, "int8")
    return str(caught.value)


def test_what_is_not_ddp_is_refused() -> None:
    [told] = syncline.run(partial(refuse, other=nn.Linear(2, 2)), ranks=1, fabric="threads")
    assert "Linear is not a DistributedDataParallel" in told


# Slopes that are known, two parameters in a bucket each


class Slopes(nn.Module):
    """A loss whose gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(600)), nn.Parameter(torch.zeros(600))

    def forward(self, first: Tensor, second: Tensor | None) -> Tensor:
        loss = (self.first * first).sum()
        return loss if second is None else loss + (self.second * second).sum()


def slopes(step: int, rank: int) -> tuple[Tensor, Tensor]:
    first, second = torch.randn(2, 600, generator=torch.Generator().manual_seed(100 * step + rank))
    return first, second


def scaled_law(fabric: syncline.Fabric, bad: int) -> Tensor:
    """How far what was sent and what is kept are from the gradients of all steps but a bad one."""
    model = Slopes()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    hook = attach(ddp, "topk:0.05", optimizer, scaler=scaler)
    wanted = torch.zeros(1200)
    for step in range(10):
        optimizer.zero_grad()
        first, second = slopes(step, fabric.rank)
        if step == bad and fabric.rank == 1:
            first[0] = float("nan")
        scaler.scale(ddp(first, second)).backward()
        assert step != bad or bool(model.second.grad.isfinite().all())
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if step != bad:
            wanted += torch.stack([torch.cat(slopes(step, rank)) for rank in range(2)]).mean(0)
    residuals, scales = residuals_of(hook), hook.state_dict()["codec_state"]["step_scale"]
    kept = torch.cat([residuals["first"], residuals["second"]]) * scales["first"]
    fabric.all_reduce(kept, op="mean")
    assert scales["first"] == scales["second"] == 1 / scale
    hook.close()
    return kept - torch.cat([model.first.detach(), model.second.detach()]) - wanted


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bad", [-1, 5])
def test_sent_plus_kept_is_the_gradient_with_a_scale_that_changes_and_one_bad_bucket(bad: int) -> None:
    for missing in syncline.run(partial(scaled_law, bad=bad), ranks=2, fabric="torch"):
        assert missing.abs().max() < 1e-5


def law_of_seldom_used(fabric: syncline.Fabric, codec: str, is_used: Callable[[int, int], bool], **how: bool) -> float:
    """How far off the law is where `second` is used in some passes only, of which two make a step.

    The first pass of a step is synchronized too, or left to the second with `no_sync`.
    """
    pauses = how.pop("pauses", False)
    model = Slopes()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hook = attach(ddp, codec, optimizer)
    wanted = torch.zeros(1200)
    for number in range(24):
        first, second = slopes(number, fabric.rank)
        uses = [is_used(number, rank) for rank in range(2)]
        with ddp.no_sync() if pauses and number % 2 == 0 else nullcontext():
            ddp(first, second if uses[fabric.rank] else None).backward()
        for rank in range(2):
            first, second = slopes(number, rank)
            wanted += 0.5 * torch.cat([first, second * uses[rank]]) / 2
        if number % 2:
            never = not any(is_used(at, rank) for at in (number - 1, number) for rank in range(2))
            assert (model.second.grad is None) == never
            optimizer.step()
            optimizer.zero_grad()
    residuals, scales = residuals_of(hook), hook.state_dict()["codec_state"]["step_scale"]
    kept = torch.cat([residuals[name] * scales[name] for name in ("first", "second")])
    fabric.all_reduce(kept, op="mean")
    hook.close()
    return float((kept - torch.cat([model.first, model.second]).detach() - wanted).abs().max())


SELDOM = {
    "by nobody in some steps": lambda number, rank: number % 8 < 2,
    "by nobody in some passes": lambda number, rank: number % 4 == 0,
    "by nobody in the first passes of steps": lambda number, rank: number % 4 == 3,
    "by one or by nobody": lambda number, rank: number % 6 == 2 * rank,
}


def laws_of_seldom_used(fabric: syncline.Fabric, codec: str) -> dict[str, float]:
    return {
        f"{when}, {how}": law_of_seldom_used(fabric, codec, is_used, **how)
        for when, is_used in SELDOM.items()
        for how in ({}, {"gradient_as_bucket_view": True}, {"pauses": True})
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize("codec", ["topk:0.05", "int8", "onebit", "dgc:0.05,momentum=0,warmup=0"])
def test_of_what_no_rank_used_nothing_that_was_kept_is_lost(codec: str) -> None:
    for found in syncline.run(partial(laws_of_seldom_used, codec=codec), ranks=2, fabric="torch"):
        assert max(found.values()) < 1e-4, found


def momentum_error(fabric: syncline.Fabric, codec: str) -> float:
    """How far training through dgc with a scale that changes is from SGD with momentum."""
    model, alone = Slopes(), torch.zeros(1200, requires_grad=True)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    reference = torch.optim.SGD([alone], lr=0.125, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    hook = attach(ddp, codec, optimizer, scaler=scaler)
    for step in range(10):
        optimizer.zero_grad()
        scaler.scale(ddp(*slopes(step, fabric.rank))).backward()
        scaler.step(optimizer)
        scaler.update()
        alone.grad = torch.stack([torch.cat(slopes(step, rank)) for rank in range(2)]).mean(0)
        reference.step()
    hook.close()
    return float((torch.cat([model.first, model.second]) - alone).abs().max())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("codec", ["dgc:1.0,momentum=0.9", "rules:codec=(dgc:0.01,momentum=0.9)"])
def test_dgc_that_sends_all_is_momentum_sgd_under_a_scaler(codec: str) -> None:
    assert max(syncline.run(partial(momentum_error, codec=codec), ranks=2, fabric="torch")) < 1e-5


def sent_while_warm(fabric: syncline.Fabric) -> list[int]:
    model = Slopes()
    hook = attach(ddp := DistributedDataParallel(model), "warmup:steps=2,codec=(topk:0.3)")
    counts = []
    for step in range(4):
        model.zero_grad()
        ddp(*slopes(step, 0)).backward()
        counts.append(int(model.first.grad.count_nonzero()))
    hook.close()
    return counts


@pytest.mark.timeout(60)
def test_a_warm_up_has_as_many_steps_as_were_asked_for() -> None:
    for counts in syncline.run(sent_while_warm, ranks=2, fabric="torch"):
        assert [count == 600 for count in counts] == [True, True, False, False]


def load_states(fabric: syncline.Fabric) -> None:
    hook = attach(DistributedDataParallel(Slopes()), "topk:0.1")
    empty = hook.state_dict()
    states = [
        empty
        | {
            "rank": rank,
            "world": 3,
            "step": 7,
            "buckets": [["first"]],
            "codec_state": {"residual": {"first": kept}, "step_scale": {}, "state": {}},
        }
        for rank, kept in enumerate(torch.tensor([0.0, 3.0, 6.0]).expand(600, 3).T)
    ]
    hook.load_state_dict(states)
    assert hook.step == 7
    assert torch.equal(residuals_of(hook)["first"], torch.full((600,), 3.0))
    hook.load_state_dict(empty)
    assert not residuals_of(hook)
    with pytest.raises(ConfigError, match="needs its own state"):
        hook.load_state_dict(empty | {"rank": 1 - fabric.rank})
    with pytest.raises(ConfigError, match="codec=int8"):
        hook.load_state_dict(empty | {"codec": "int8"})
    hook.close()


@pytest.mark.timeout(60)
def test_a_rank_goes_on_from_its_own_state_or_from_those_of_all() -> None:
    syncline.run(load_states, ranks=2, fabric="torch")


def attach_to_a_table(fabric: syncline.Fabric) -> str:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    with pytest.raises(ConfigError) as caught:
        attach(DistributedDataParallel(model), "none")
    return str(caught.value)


def test_sparse_gradients_are_refused_by_name() -> None:
    for said in syncline.run(attach_to_a_table, ranks=2, fabric="torch"):
        assert "0.weight has sparse gradients, which DDP gives to no hook" in said


def average_complex(fabric: syncline.Fabric) -> list[list[Tensor]]:
    """Gradients of complex parameters, as DDP averages them alone, and with codecs that leave nothing out."""
    found = []
    for codec in ("", "none", "topk:1"):
        draws = torch.Generator().manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4, dtype=torch.complex64) for _ in range(2)])
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype)
        ddp = DistributedDataParallel(model)
        if codec:
            attach(ddp, codec)
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(fabric.rank), dtype=torch.complex64)
        ddp(batch).abs().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    return found


def test_complex_gradients_are_averaged_as_ddp_does() -> None:
    ranks = syncline.run(average_complex, ranks=2, fabric="torch")
    for by_ddp, *others in ranks:
        for other in others:
            torch.testing.assert_close(other, by_ddp)
        torch.testing.assert_close(by_ddp, ranks[0][0])
