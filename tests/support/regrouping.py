"""Process groups that are destroyed and made again, and what is found over them. Light: ranks import it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import syncline
from support.guarded import batch, filled
from syncline.errors import SynclineError
from syncline.fabric.base import Fabric

RANKS = {"swapped": lambda rank, world: world - 1 - rank, "same": lambda rank, world: rank}
RANKS["smaller"] = lambda rank, world: rank - 1


def started(rank: int, **settings: object) -> tuple[nn.Module, SGD, syncline.Sync]:
    """A model of the rank's own, and a `Sync` of it."""
    model = filled(nn.Linear(6, 4), seed=rank)
    optimizer = SGD(model.parameters(), lr=0.1)
    return model, optimizer, syncline.Sync(model, optimizer, **settings)


def train_step(rank: int, model: nn.Module, optimizer: SGD) -> None:
    optimizer.zero_grad()
    model(batch(rank, 1)).square().mean().backward()
    optimizer.step()


def refusal_of(call: object, *arguments: object, **named: object) -> str:
    """What was said against a call; nothing if it went well."""
    try:
        call(*arguments, **named)
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def regroup(fabric: Fabric, how: str, name: str, mode: str, folder: str) -> dict[str, object] | None:
    """Train in one group and then in another, in which ranks are counted anew; the last is used by two of them."""
    model, optimizer, before = started(fabric.rank, fabric=name, mode=mode)
    train_step(fabric.rank, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()
    refused = refusal_of(started, fabric.rank, fabric="auto")
    rank = RANKS[how](fabric.rank, fabric.world)
    world = fabric.world - (how == "smaller")
    if rank < 0:
        return None
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    model_after, optimizer_after, after = started(rank, fabric=name)
    from_first = torch.equal(model_after.weight, filled(nn.Linear(6, 4), seed=0).weight)
    train_step(rank, model_after, optimizer_after)
    again = started(rank, fabric=name)[2]
    found = {
        "refused": refused,
        "place": (after._given.rank, after._given.world),
        "from_first": from_first,
        "same": again._given is after._given,
        "given": refusal_of(started, rank, fabric=fabric),
    }
    for sync in (before, after, again):
        sync.close()
    dist.destroy_process_group()
    return found


def close_after_destroying(fabric: Fabric, mode: str) -> str:
    """The user ends the process group, and then closes what was made over it."""
    model, optimizer, sync = started(fabric.rank, mode=mode)
    train_step(fabric.rank, model, optimizer)
    fabric.barrier()
    dist.destroy_process_group()
    return refusal_of(sync.close)


def join_a_group_later(fabric: Fabric, folder: str) -> tuple[str, str, int]:
    """A world of one, as outside torchrun, in which the user makes a process group."""
    from syncline.current import using

    with using(None):
        dist.destroy_process_group()
        alone = syncline.init()
        model, optimizer, _ = started(fabric.rank)
        train_step(fabric.rank, model, optimizer)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=fabric.rank, world_size=fabric.world)
        sync = started(fabric.rank)[2]
        return refusal_of(train_step, fabric.rank, model, optimizer), sync._given.name, sync._given.world - alone.world


def asks_inside_run(fabric: Fabric) -> tuple[bool, bool, str, str]:
    """`init` and names of fabrics, in ranks that `run` has started."""
    assert "RANK" not in os.environ
    other = "torch" if fabric.name == "shm" else "shm"
    return (
        syncline.init() is fabric,
        fabric.name == "threads" or started(fabric.rank, fabric=fabric.name)[2]._given is fabric,
        refusal_of(syncline.init, deadlines=syncline.Deadlines(fabric.deadlines.operation + 1)),
        refusal_of(started, fabric.rank, fabric=other),
    )
