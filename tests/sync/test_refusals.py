"""Requests that make no sense are refused, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
