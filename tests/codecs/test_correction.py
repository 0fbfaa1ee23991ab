"""Momentum before a codec: with what was not sent, it comes to what SGD with momentum does."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.guarded import filled
from syncline.errors import PairingError, RankFailed
from syncline.fabric.threads import Threads

RATES = (0.5, 0.5, 0.0625, 0.0625, 0.0, 0.25, 0.25, 0.125)
SHAPES = {"matrix": (24, 20), "vector": (37,), "other": (4, 6)}
SMALL = {"bucket_bytes": 2000, "first_bucket_bytes": 500}
DENSE = "rules:codec=(dgc:0.1,momentum=0.5,warmup=0),below=100"


class Steep(nn.Module):
    """Its gradients are what it is given: the loss is a plain product."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, slopes: list[Tensor]) -> Tensor:
        return sum((p * s).sum() for p, s in zip(self.parameters(), slopes, strict=True))


def slopes_of(step: int, rank: int) -> list[Tensor]:
    """Small whole numbers, so that sums are exact."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-8, 9, shape, generator=draw).float() for shape in SHAPES.values()]


class Trainee:
    """One rank, with plain SGD and a codec."""

    def __init__(self, fabric: syncline.Fabric, codec: str, mode: str = "sync", collective: str = "auto") -> None:
        self.rank = fabric.rank
        self.model = Steep()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATES[0])
        settings = {"codec": codec, "mode": mode, "collective": collective}
        self.sync = syncline.Sync(self.model, self.optimizer, fabric=fabric, check_every=2, **settings, **SMALL)

    def train(self, steps: range, skipped: int = -1) -> None:
        for step in steps:
            self.optimizer.param_groups[0]["lr"] = RATES[step]
            self.optimizer.zero_grad()
            slopes = slopes_of(step, self.rank)
            if step == skipped:
                slopes[0][3, 3] = torch.nan
            self.model(slopes).backward()
            self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def kept(self) -> dict[str, Tensor]:
        """In the units of a step."""
        state = self.sync.state_dict()["codec_state"]
        return {name: kept.view(SHAPES[name]) * state["step_scale"][name] for name, kept in state["residual"].items()}


def momentum_sgd(world: int, skipped: int = -1, **settings: object) -> dict[str, Tensor]:
    """Where torch's own optimizer goes with the mean gradients."""
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0], **settings)
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        for number, p in enumerate(model.parameters()):
            p.grad = torch.stack([slopes_of(step, rank)[number] for rank in range(world)]).mean(0)
        if step != skipped:
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def went(fabric: syncline.Fabric, codec: str, **how: str) -> dict[str, Tensor]:
    trainee = Trainee(fabric, codec, **how)
    trainee.train(range(len(RATES)))
    return trainee.parameters()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("codec", [DENSE, f"rules:names=nothing,below=0,codec=({DENSE})"])
def test_what_rules_leave_dense_trains_exactly_as_with_momentum_sgd(codec: str, world: int) -> None:
    exact = momentum_sgd(world, momentum=0.5)
    for found in syncline.run(partial(went, codec=codec), world, "threads"):
        assert torch.equal(found["vector"], exact["vector"])
        assert torch.equal(found["other"], exact["other"])
        assert not torch.equal(found["matrix"], exact["matrix"])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("codec", ["dgc:1.0,momentum=0.5", "rules:codec=(dgc:1.0,momentum=0.5),below=100"])
def test_dgc_that_sends_everything_is_momentum_sgd_while_the_rate_changes(codec: str, nesterov: bool) -> None:
    codec = codec.replace("=0.5", f"=0.5,nesterov={str(nesterov).lower()}")
    exact = momentum_sgd(2, momentum=0.5, nesterov=nesterov)
    for found in syncline.run(partial(went, codec=codec), 2, "threads"):
        assert all(torch.equal(found[name], exact[name]) for name in exact)


@pytest.mark.parametrize("codec", ["dgc:1.0,momentum=0.5", "rules:codec=(dgc:1.0,momentum=0.5),below=100"])
def test_a_worker_of_a_server_trains_as_with_momentum_sgd(codec: str) -> None:
    def work(fabric: syncline.Fabric) -> dict[str, Tensor]:
        trainee = Trainee(fabric, codec, mode="async:pull=none")
        trainee.train(range(len(RATES)))
        trainee.sync.drain()
        found = trainee.parameters()
        trainee.sync.close()
        return found

    (found,) = syncline.run(work, 1, "threads")
    exact = momentum_sgd(1, momentum=0.5)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def sent_and_kept(fabric: syncline.Fabric, codec: str, skipped: int, collective: str) -> dict[str, Tensor]:
    """Where parameters would be had all been sent, as far as this rank knows."""
    trainee = Trainee(fabric, codec, collective=collective)
    trainee.train(range(len(RATES)), skipped if fabric.rank == 1 else -1)
    kept = trainee.kept()
    assert kept["matrix"].any() or collective != "auto"
    return {name: p - kept[name] for name, p in trainee.parameters().items()}


@pytest.mark.parametrize("collective", ["auto", "hierarchical"])
@pytest.mark.parametrize("skipped", [-1, 3])
@pytest.mark.parametrize("codec", ["dgc:0.1,momentum=0,warmup=0", "dgc:0.1,momentum=0.5,warmup=3", DENSE])
def test_sent_plus_kept_is_the_momentum_with_changing_rates_and_skipped_steps(
    codec: str, skipped: int, collective: str
) -> None:
    work = partial(sent_and_kept, codec=codec, skipped=skipped, collective=collective)
    by_rank = syncline.run(work, 3, Threads(host_sizes=[1, 2]))
    exact = momentum_sgd(3, skipped, momentum=0.0 if "momentum=0," in codec else 0.5)
    for name, wanted in exact.items():
        found = torch.stack([ends[name] for ends in by_rank]).mean(0)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_other_ranks_go_on_with_the_mean_of_momenta_and_of_what_was_kept(world: int) -> None:
    def begin(fabric: syncline.Fabric) -> dict:
        trainee = Trainee(fabric, DENSE)
        trainee.train(range(4))
        return copy.deepcopy({"parameters": trainee.parameters(), "state": trainee.sync.state_dict()})

    def go_on(fabric: syncline.Fabric, saved: list[dict]) -> dict[str, Tensor]:
        trainee = Trainee(fabric, DENSE)
        trainee.model.load_state_dict(saved[0]["parameters"])
        trainee.sync.load_state_dict([one["state"] for one in saved])
        trainee.rank = 0
        trainee.train(range(4, len(RATES)))
        kept = trainee.kept()
        return {name: p - kept[name] for name, p in trainee.parameters().items()}

    by_rank = syncline.run(partial(go_on, saved=syncline.run(begin, 3, "threads")), world, "threads")
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0], momentum=0.5)
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        for number, p in enumerate(model.parameters()):
            ranks = range(3) if step < 4 else range(1)
            p.grad = torch.stack([slopes_of(step, rank)[number] for rank in ranks]).mean(0)
        optimizer.step()
    for name, wanted in model.named_parameters():
        found = torch.stack([ends[name] for ends in by_rank]).mean(0)
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-5)


# A world of one


@pytest.mark.parametrize("collective", ["auto", "hierarchical"])
@pytest.mark.parametrize("codec", ["dgc:0.1,momentum=0.5", DENSE])
def test_alone_everything_trains_exactly_as_with_momentum_sgd(codec: str, collective: str) -> None:
    (found,) = syncline.run(partial(went, codec=codec, collective=collective), 1, "threads")
    exact = momentum_sgd(1, momentum=0.5)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_alone_a_step_that_is_not_finite_leaves_the_momentum_as_it_was() -> None:
    def work(fabric: syncline.Fabric) -> dict[str, Tensor]:
        trainee = Trainee(fabric, "dgc:0.1,momentum=0.5")
        trainee.train(range(len(RATES)), skipped=3)
        return trainee.parameters()

    (found,) = syncline.run(work, 1, "threads")
    exact = momentum_sgd(1, skipped=3, momentum=0.5)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_alone_join_and_a_restart_change_nothing() -> None:
    def work(fabric: syncline.Fabric) -> dict[str, Tensor]:
        first = Trainee(fabric, "dgc:0.1,momentum=0.5")
        with first.sync.join():
            first.train(range(3))
        saved = copy.deepcopy({"parameters": first.parameters(), "state": first.sync.state_dict()})
        first.sync.close()
        again = Trainee(fabric, "dgc:0.1,momentum=0.5")
        again.model.load_state_dict(saved["parameters"])
        again.sync.load_state_dict(saved["state"])
        with again.sync.join():
            again.train(range(3, len(RATES)))
        return again.parameters()

    (found,) = syncline.run(work, 1, "threads")
    exact = momentum_sgd(1, momentum=0.5)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


@pytest.mark.parametrize("codec", ["none", "topk:0.1", "rules:codec=(int8)"])
def test_alone_a_codec_without_momentum_has_nothing_to_do(codec: str) -> None:
    assert syncline.run(lambda fabric: Trainee(fabric, codec).sync.driver is None, 1, "threads") == [True]


@pytest.mark.parametrize("codec", ["topk:0.1", "onebit", "powersgd:2", "rules:codec=(int4)"])
def test_alone_nothing_is_left_out_in_a_mode_that_has_work_to_do(codec: str) -> None:
    def work(fabric: syncline.Fabric) -> tuple[dict[str, Tensor], int]:
        trainee = Trainee(fabric, codec, mode="delayed")
        trainee.train(range(2))
        trainee.sync.drain()
        return trainee.parameters(), trainee.sync.report().sent_bytes

    ((found, said),) = syncline.run(work, 1, "threads")
    assert said == 0
    for number, moved in enumerate(found.values()):
        assert torch.equal(moved, -RATES[0] * (slopes_of(0, 0)[number] + slopes_of(1, 0)[number]))


def test_masking_between_hosts_is_refused() -> None:
    work = partial(went, codec="rules:codec=(dgc:masking=true)", collective="hierarchical")
    with pytest.raises(RankFailed) as caught:
        syncline.run(work, 2, Threads(host_sizes=[1, 1]))
    error = next(iter(caught.value.failures.values()))
    assert isinstance(error, PairingError)
    assert "masking=false" in str(error)


def twice_before_a_step(fabric: syncline.Fabric) -> None:
    model = filled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.Sync(model, optimizer, fabric=fabric, codec="dgc")
    for _ in range(2):
        model(torch.ones(2, 3) + fabric.rank).sum().backward()


def test_momentum_of_momentum_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"momenta by now.*accumulate=N"):
        syncline.run(twice_before_a_step, ranks=2, fabric="threads")
