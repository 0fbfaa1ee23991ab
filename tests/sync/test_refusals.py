"""Requests that make no sense are refused, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

import syncline
from support import faulty
from support.guarded import Net
from syncline.errors import ConfigError, UnknownName
from syncline.fabric.base import Fabric
from syncline.fabric.threads import Threads


@pytest.fixture
def alone() -> Iterator[Fabric]:
    """A world of one."""
    with Threads().group(1).fabric(0) as fabric:
        yield fabric


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"bucket_bytes": -5}, ConfigError, "bucket_bytes=-5 is less than 1"),
        ({"first_bucket_bytes": 0}, ConfigError, "first_bucket_bytes=0 is less than 1"),
        ({"accumulate": 0}, ConfigError, "accumulate=0 is less than 1"),
        ({"check_every": -1}, ConfigError, "check_every=-1 is less than 0"),
        ({"accumulate": 1.5}, ConfigError, "accumulate=1.5 is not a whole number"),
        ({"bucket_bytes": "25MB"}, ConfigError, "bucket_bytes='25MB' is not a whole number"),
        ({"seed": None}, ConfigError, "seed=None is not a whole number"),
        ({"most_skips": -1}, ConfigError, "most_skips=-1 is less than 0"),
        ({"buffers": "mean"}, UnknownName, "unknown buffers 'mean'"),
        ({"nonfinite": "x"}, UnknownName, "unknown nonfinite 'x'; known: ignore, raise, skip"),
        ({"collective": "rign"}, UnknownName, "unknown collective 'rign'; did you mean ring"),
        ({"fabric": "shmm"}, UnknownName, "unknown fabric 'shmm'; did you mean shm"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_with_its_value_and_the_rule(
    alone: Fabric, settings: dict, error: type[ConfigError], text: str
) -> None:
    model = Net()
    with pytest.raises(error) as caught:
        syncline.Sync(model, torch.optim.SGD(model.parameters()), **{"fabric": alone, **settings})
    assert text in str(caught.value)


def schedule_of(model: nn.Module) -> object:
    return torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda model: model.parameters(), "Parameter"),
        (lambda model: "sgd", "str"),
        (lambda model: None, "NoneType"),
        (lambda model: torch.optim.SGD, "type"),
        (schedule_of, "ConstantLR"),
        (lambda model: [torch.optim.SGD(model.parameters()), None], "NoneType"),
    ],
)
def test_what_is_no_optimizer_is_refused(alone: Fabric, make: Callable, name: str) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=rf"{name} is not a torch\.optim\.Optimizer"):
        syncline.Sync(model, make(model), fabric=alone)


def test_no_optimizer_at_all_is_refused(alone: Fabric) -> None:
    with pytest.raises(ConfigError, match="no optimizer was given"):
        syncline.Sync(Net(), [], fabric=alone)


def test_a_list_of_models_is_refused(alone: Fabric) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=r"list is not a torch\.nn\.Module; put several models in an nn\.ModuleList"):
        syncline.Sync([model], torch.optim.SGD(model.parameters()), fabric=alone)


def sync_twice(fabric: Fabric, closes: bool) -> str:
    """What becomes of a second `Sync` of some parameters."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    first = syncline.Sync(model, optimizer, fabric=fabric)
    if closes:
        first.close()
    try:
        syncline.Sync(nn.Sequential(nn.Linear(2, 2), model.second), optimizer, fabric=fabric)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("closes", [False, True])
def test_a_parameter_has_one_sync_at_a_time(closes: bool) -> None:
    for text in syncline.run(partial(sync_twice, closes=closes), 2, "threads"):
        assert ("1.weight is synchronized by another Sync already; close() that one first" in text) != closes


def step_in_backward(fabric: Fabric) -> str:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    syncline.Sync(model, optimizer, fabric=fabric)
    model.first.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(ConfigError) as caught:
        model(torch.ones(2, 6)).sum().backward()
    return str(caught.value)


def test_a_step_inside_backward_is_refused() -> None:
    for text in syncline.run(step_in_backward, 2, "threads"):
        assert "optimizer.step() was called in the middle of backward()" in text


def change_type(fabric: Fabric) -> str:
    model = Net()
    syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=fabric)
    model(torch.ones(2, 6)).sum().backward()
    model.double().zero_grad()
    with pytest.raises(ConfigError) as caught:
        model(torch.ones(2, 6).double()).sum().backward()
    return str(caught.value)


def test_a_model_that_was_converted_is_refused() -> None:
    for text in syncline.run(change_type, 2, "threads"):
        assert "was float32 and is float64 now; convert the model before Sync" in text


def test_a_model_without_trainable_parameters_is_refused(alone: Fabric) -> None:
    model = Net().requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model needs a gradient"):
        syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=alone)


def test_complex_parameters_are_refused_by_name(alone: Fabric) -> None:
    model = Net()
    model.second = nn.Linear(8, 8, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"second\.weight is complex64; gradients can be of float32, float64"):
        syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=alone)


def test_a_refused_request_leaves_no_hooks(alone: Fabric) -> None:
    model = Net().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError):
        syncline.Sync(model, optimizer, fabric=alone)
    assert faulty.hooks_of(model, optimizer) == 0
    assert alone.siblings == []
