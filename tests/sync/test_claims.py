"""A gradient is averaged by one `Sync`, or by DDP, and by nobody else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import nn

import syncline
from support import claims
from support.catalogue import one_now_others_slow
from support.guarded import Net
from syncline.errors import ConfigError
from syncline.fabric.base import Fabric

MODES = one_now_others_slow(("sync", "delayed", "local:1", "async"))


@cache
def beside_ddp(mode: str) -> list[dict[str, tuple[str, bool]]]:
    return syncline.run(partial(claims.beside_ddp, mode=mode), 2, "torch", syncline.Deadlines(20.0, join=60.0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", [way.__name__ for way in claims.WAYS])
def test_a_model_that_ddp_averages_too_is_refused_before_a_step(way: str, mode: str) -> None:
    for found in beside_ddp(mode):
        said, is_unchanged = found[way]
        assert "synchronized by another Sync" in said or "is in a DistributedDataParallel" in said
        assert "second.weight" in said or "first.weight" in said or "second.module.weight" in said
        assert is_unchanged


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", [way.__name__ for way in claims.HARMLESS])
def test_a_ddp_of_other_parameters_or_of_nobody_is_not_in_the_way(way: str, mode: str) -> None:
    for found in beside_ddp(mode):
        said, is_unchanged = found[way]
        assert said == ""
        assert not is_unchanged


def the_same_model(model: Net) -> nn.Module:
    return model


def a_part_of_it(model: Net) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), model.second)


def what_is_compiled(model: Net) -> nn.Module:
    return torch.compile(model, backend="eager")


def what_is_wrapped(model: Net) -> nn.Module:
    return nn.DataParallel(model)


def what_is_parametrized(model: Net) -> nn.Module:
    nn.utils.parametrizations.orthogonal(model.second)
    return model.second


def what_shares_memory(model: Net) -> nn.Module:
    other = nn.Linear(8, 8)
    other.weight.data = model.second.weight.data
    return other


def what_is_frozen(model: Net) -> nn.Module:
    model.second.requires_grad_(False)
    return nn.Sequential(model.second, nn.Linear(2, 2))


SECONDS = (
    the_same_model,
    a_part_of_it,
    what_is_compiled,
    what_is_wrapped,
    what_is_parametrized,
    what_shares_memory,
    what_is_frozen,
)


def sync_twice(fabric: Fabric, second: Callable[[Net], nn.Module], mode: str, closes: bool) -> str:
    """What becomes of a second `Sync` of some parameters, whether or not anything has a reference to the first one."""
    model = Net()
    first = syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=fabric, mode=mode)
    if closes:
        first.close()
    del first
    other = second(model)
    try:
        syncline.Sync(other, torch.optim.SGD(other.parameters()), fabric=fabric, mode=mode).close()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", ["sync", "local:1", "async"])
@pytest.mark.parametrize("second", SECONDS)
def test_a_parameter_has_one_sync_at_a_time(second: Callable[[Net], nn.Module], mode: str) -> None:
    for text in syncline.run(partial(sync_twice, second=second, mode=mode, closes=False), 2, "threads"):
        assert "is synchronized by another Sync already; close() that one first" in text
    for text in syncline.run(partial(sync_twice, second=second, mode=mode, closes=True), 2, "threads"):
        assert text == ""


def fail_and_try_again(fabric: Fabric, mode: str) -> int:
    """Hooks on the model and its parameters after a `Sync` that failed, when another one has been made and closed."""
    model = Net()
    model.table = nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError):
        syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    syncline.Sync(model, optimizer, fabric=fabric).close()
    return len(model._forward_pre_hooks) + sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())


@pytest.mark.parametrize("mode", ["delayed", "async"])
def test_a_sync_that_failed_has_no_claim(mode: str) -> None:
    assert syncline.run(partial(fail_and_try_again, mode=mode), 2, "threads") == [0, 0]
