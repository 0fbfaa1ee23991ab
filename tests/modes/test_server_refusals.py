"""What servers and workers refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD

import syncline
from support.guarded import Net, batch, filled
from support.models import Words, frozen_below
from syncline.codecs.registry import codec_of
from syncline.errors import ConfigError, PairingError, RankFailed
from syncline.modes.asynchronous import AsyncSGD


class Around(SGD):
    """An optimizer that steps through another one."""

    def __init__(self, parameters: object, lr: float) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr)
        self.inner = [SGD(parameters, lr)]


def start(model: nn.Module, ranks: int = 2, kind: type = SGD, **settings: str) -> BaseException:
    def work(fabric: syncline.Fabric) -> None:
        own = copy.deepcopy(model)
        syncline.Sync(own, kind(own.parameters(), lr=0.1), fabric=fabric, **settings)

    with pytest.raises(RankFailed) as failed:
        syncline.run(work, ranks=ranks, fabric="threads")
    return failed.value.failures[0]


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"mode": "async:servers=0"}, ConfigError, "servers=0 is less than 1"),
        ({"mode": "async:servers=3"}, ConfigError, "try servers=2"),
        ({"mode": "async:servers=2,apart=true"}, ConfigError, "start 3 ranks or more"),
        ({"mode": "bounded:ahead=-1"}, ConfigError, "try bounded:ahead=4"),
        ({"mode": "async:compensation=-1"}, ConfigError, "try 0.04"),
        ({"mode": "async:pull=(dgc)"}, PairingError, "try pull=int8"),
        ({"mode": "async:pull=(rules:codec=(dgc))"}, PairingError, "try pull=int8"),
        ({"mode": "async:pull=(onebit:vote=true,feedback=false)"}, PairingError, "try pull=int8"),
        ({"mode": "async:pull=(randomk:0.1,scaled=true,feedback=false)"}, PairingError, "try pull=int8"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict, kind: type, message: str) -> None:
    error = start(nn.Linear(2, 2), **settings)
    assert isinstance(error, kind)
    assert message in str(error)


@pytest.mark.parametrize("mode", ["async", "bounded:ahead=1"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LBFGS, "LBFGS evaluates a closure in its step"),
        (Around, "Around steps through another optimizer, SGD, which would stay"),
    ],
)
def test_an_optimizer_that_cannot_step_at_a_server_is_refused_by_all_ranks(kind: type, message: str, mode: str) -> None:
    error = start(nn.Linear(2, 2), kind=kind, mode=mode)
    assert isinstance(error, PairingError)
    assert message in str(error)


@pytest.mark.parametrize(
    ("gradients", "parameters"),
    [
        ("none", "none"),
        ("bf16", "bf16"),
        ("int4", "int4"),
        ("powersgd:2", "powersgd:2"),
        ("warmup:steps=3,codec=(fp16)", "warmup:steps=3,codec=(fp16)"),
        ("topk:0.01", "int8"),
        ("rules:codec=(topk:0.01)", "int8"),
        ("randomk:0.1", "int8"),
        ("dgc", "int8"),
        ("onebit:vote=true,feedback=false", "int8"),
    ],
)
def test_parameters_go_as_gradients_do_unless_that_says_too_little(gradients: str, parameters: str) -> None:
    assert AsyncSGD().pull_codec(codec_of(gradients)) == codec_of(parameters)
    assert AsyncSGD(pull="topk:0.5").pull_codec(codec_of(gradients)) == codec_of("topk:0.5")


def test_sparse_gradients_are_refused() -> None:
    error = start(Words(), mode="async")
    assert isinstance(error, PairingError)
    assert "use mode=sync" in str(error)


def test_a_server_that_trains_is_told_how_to_serve() -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async:apart=true")
        message = ""
        if fabric.rank == 1:
            try:
                optimizer.step()
            except ConfigError as error:
                message = str(error)
        sync.close()
        return message

    assert "if not sync.serve():" in syncline.run(work, ranks=2, fabric="threads")[1]


def test_unfreezing_later_is_refused() -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = frozen_below()
        optimizer = SGD(model.parameters(), lr=0.1)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async")
        message = ""
        for step in range(2):
            if step:
                model.requires_grad_(True)
            try:
                model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
                optimizer.step()
            except ConfigError as error:
                message = str(error)
        sync.close()
        return message

    for message in syncline.run(work, ranks=2, fabric="threads"):
        assert "unfreeze it before Sync" in message


def test_an_optimizer_that_unscales_by_itself_is_refused() -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async", scaler=scaler)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        try:
            scaler.step(optimizer)
        except ConfigError as error:
            return str(error)
        finally:
            sync.close()
        return ""

    for message in syncline.run(work, ranks=2, fabric="threads"):
        assert "scaler.unscale_(optimizer)" in message


def test_other_modes_have_no_away() -> None:
    def work(fabric: syncline.Fabric) -> None:
        model = nn.Linear(2, 2)
        sync = syncline.Sync(model, SGD(model.parameters(), lr=0.1), fabric=fabric)
        with sync.away():
            pass

    with pytest.raises(RankFailed) as failed:
        syncline.run(work, ranks=2, fabric="threads")
    assert "away() is for async and bounded" in str(failed.value.failures[0])


def add_what_the_model_has(optimizer: SGD, model: Net) -> None:
    optimizer.add_param_group({"params": list(model.third.parameters())})


def add_with_other_settings(optimizer: SGD, model: Net) -> None:
    optimizer.add_param_group({"params": list(model.third.parameters()), "lr": 0.5, "momentum": 0.9})


def add_what_is_new(optimizer: SGD, model: Net) -> None:
    optimizer.add_param_group({"params": list(nn.Linear(4, 3).parameters())})


def split_a_group(optimizer: SGD, model: Net) -> None:
    members = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = members[:2]
    optimizer.add_param_group({"params": members[2:]})


def remove_from_a_group(optimizer: SGD, model: Net) -> None:
    optimizer.param_groups[0]["params"].pop()


def change_groups(fabric: syncline.Fabric, mode: str, change: Callable) -> tuple[str, int]:
    """What the last worker is told in the step after it has changed groups, and how many steps every worker makes."""
    model = filled(Net())
    optimizer = SGD([*model.first.parameters(), *model.second.parameters()], lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    said = ""
    for step in range(5):
        if step == 2 and fabric.rank == fabric.world - 1:
            change(optimizer, model)
        try:
            optimizer.zero_grad()
            model(batch(fabric.rank, step)).square().mean().backward()
            optimizer.step()
        except ConfigError as error:
            said = str(error)
            break
    sync.close()
    return said, step


@pytest.mark.parametrize("mode", ["async", "bounded:ahead=0", "bounded:ahead=2,servers=2"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (add_what_the_model_has, "third.weight and 1 more came to the optimizer after servers were set up"),
        (add_with_other_settings, "third.weight and 1 more came to the optimizer after servers were set up"),
        (add_what_is_new, "a parameter of shape [3, 4] and 1 more came to the optimizer after servers were set up"),
        (split_a_group, "groups of [4] parameters in the optimizer became others, of [2, 2], after servers"),
        (remove_from_a_group, "groups of [4] parameters in the optimizer became others, of [3], after servers"),
    ],
)
def test_groups_that_servers_do_not_have_are_refused_by_the_worker(change: Callable, text: str, mode: str) -> None:
    def work(fabric: syncline.Fabric) -> tuple[str, int]:
        return change_groups(fabric, mode, change)

    first, last = syncline.run(work, ranks=2, fabric="threads", deadlines=syncline.Deadlines(20.0))
    assert first == ("", 4)
    assert last[0].startswith(text)
    assert last[1] == 2


def step_with_a_stranger(fabric: syncline.Fabric) -> str:
    model, other = nn.Linear(2, 2), nn.Linear(2, 3)
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.1)
    syncline.Sync(model, optimizer, fabric=fabric, mode="async")
    other(model(torch.ones(1, 2))).sum().backward()
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    return str(caught.value)


def test_an_optimizer_with_parameters_that_no_server_has_is_refused() -> None:
    for said in syncline.run(step_with_a_stranger, ranks=2, fabric="threads"):
        assert "a parameter of shape [3, 2] and 1 more, in no model with a Sync: no server has that" in said


def test_two_parameters_in_the_same_memory_are_refused() -> None:
    def work(fabric: syncline.Fabric) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight.data = model[0].weight.data
        with pytest.raises(ConfigError, match=r"1\.weight and 0\.weight are two parameters in the same memory"):
            syncline.Sync(model, SGD(model.parameters(), lr=0.1), fabric=fabric, mode="bounded")

    syncline.run(work, ranks=2, fabric="threads")
