"""What servers and workers refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD

import syncline
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
    [(LBFGS, "LBFGS needs a closure"), (Around, "Around steps through another optimizer, SGD, which would stay")],
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
