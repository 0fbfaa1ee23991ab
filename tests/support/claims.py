"""Models that somebody else averages the gradients of beside a `Sync`. Light: ranks import it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import syncline
from support.guarded import Net, batch, filled, snapshot
from syncline.errors import ConfigError
from syncline.fabric.base import Fabric
from syncline.integrations.ddp import attach

MakeSync = Callable[[nn.Module], syncline.Sync]


def around_the_model(model: Net, make: MakeSync) -> nn.Module:
    wrapper = DistributedDataParallel(model)
    make(model)
    return wrapper


def given_itself(model: Net, make: MakeSync) -> nn.Module:
    wrapper = DistributedDataParallel(model)
    make(wrapper)
    return wrapper


def around_a_part(model: Net, make: MakeSync) -> nn.Module:
    model.second = DistributedDataParallel(model.second)
    make(model)
    return model


def around_a_parent(model: Net, make: MakeSync) -> nn.Module:
    wrapper = DistributedDataParallel(nn.Sequential(model, nn.Linear(4, 4)))
    make(model)
    return wrapper


def made_after_sync(model: Net, make: MakeSync) -> nn.Module:
    make(model)
    return DistributedDataParallel(model)


def replicated_before_sync(model: Net, make: MakeSync) -> nn.Module:
    replicate(model)  # makes a DDP in the first forward pass
    make(model)
    return model


def attached_after_sync(model: Net, make: MakeSync) -> nn.Module:
    make(model)
    attach(DistributedDataParallel(model), "fp16")
    return model


WAYS = (
    around_the_model,
    given_itself,
    around_a_part,
    around_a_parent,
    made_after_sync,
    replicated_before_sync,
    attached_after_sync,
)


def thrown_away(model: Net, make: MakeSync) -> nn.Module:
    wrapper = DistributedDataParallel(model)
    wrapper.itself = [wrapper]  # so that only the garbage collector ends it
    del wrapper
    make(model)
    return model


def of_other_parameters(model: Net, make: MakeSync) -> nn.Module:
    other = DistributedDataParallel(nn.Linear(4, 4))
    make(model)
    return nn.Sequential(model, other)


def with_ignored_parameters(model: Net, make: MakeSync) -> nn.Module:
    parent = nn.Sequential(model, nn.Linear(4, 4))
    ignored = [f"0.{name}" for name, _ in model.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parent, ignored)
    wrapper = DistributedDataParallel(parent)
    make(model)
    return wrapper


HARMLESS = (thrown_away, of_other_parameters, with_ignored_parameters)


def beside_ddp(fabric: Fabric, mode: str) -> dict[str, tuple[str, bool]]:
    """For every way to have a DDP and a `Sync`: what is said before two steps, and whether parameters are as before."""
    found = {}
    for way in (*WAYS, *HARMLESS):
        model = filled(Net())
        before = snapshot(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made: list[syncline.Sync] = []
        said = said_of(way, model, optimizer, lambda one, to=optimizer, made=made: keep(made, fabric, mode, one, to))
        found[way.__name__] = said, all(map(torch.equal, before, model.parameters()))
        for sync in made:
            with suppress(ConfigError):  # what is delayed is refused again
                sync.close()
    return found


def keep(made: list[syncline.Sync], fabric: Fabric, mode: str, model: nn.Module, to: Optimizer) -> syncline.Sync:
    made.append(syncline.Sync(model, to, fabric=fabric, mode=mode))
    return made[0]


def said_of(way: Callable[[Net, MakeSync], nn.Module], model: Net, optimizer: Optimizer, make: MakeSync) -> str:
    try:
        called = way(model, make)
        for step in range(2):
            optimizer.zero_grad()
            called(batch(torch.distributed.get_rank(), step)).square().mean().backward()
            optimizer.step()
    except ConfigError as error:
        return str(error)
    return ""
