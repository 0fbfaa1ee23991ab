"""Children that a rank forks, and what they try to do in its name. Light: ranks import it."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.utils.data
from torch import nn

import syncline
from support.guarded import Net, batch, filled
from syncline.fabric.base import Fabric


def outcome(call: Callable[[], object]) -> tuple[str, float]:
    """The name of the error that a call raised, and how long that took."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, time.monotonic() - started
    return "nothing", time.monotonic() - started


def in_child(attempts: dict[str, Callable[[], object]]) -> dict[str, tuple[str, float]]:
    """How each attempt of a forked child ended; a child that hangs is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps({name: outcome(attempt) for name, attempt in attempts.items()}).encode())
        os._exit(0)
    os.close(writer)
    ended_within(child, 30.0)
    with os.fdopen(reader) as pipe:
        return json.loads(pipe.read() or "{}")


def ended_within(child: int, seconds: float) -> int:
    """The exit code of a child, which is killed if it takes longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def calls_in_a_child(fabric: Fabric) -> tuple[dict[str, tuple[str, float]], float]:
    """Collectives and messages of a child, while a call of the parent is under way; then one of all parents."""
    if fabric.rank:
        time.sleep(0.5)
    tensor = torch.ones(10)
    handle = fabric.all_reduce_async(tensor)
    found = in_child(
        {
            "all_reduce": lambda: fabric.all_reduce(torch.ones(3)),
            "all_reduce_async": lambda: fabric.all_reduce_async(torch.ones(3)).wait(),
            "engine": lambda: fabric.all_reduce(torch.ones(3), collective="ring"),
            "all_gather": lambda: fabric.all_gather(torch.ones(3)),
            "reduce_scatter": lambda: fabric.reduce_scatter(torch.ones(4)),
            "broadcast": lambda: fabric.broadcast(torch.ones(3)),
            "all_to_all": lambda: fabric.all_to_all(torch.ones(4)),
            "barrier": lambda: fabric.barrier(),
            "send": lambda: fabric.send(torch.ones(3), 1 - fabric.rank).wait(),
            "receive": lambda: fabric.receive(torch.ones(3), 1 - fabric.rank).wait(),
            "sibling": lambda: fabric.subgroup(),
            "subgroup": lambda: fabric.subgroup([0, 1]),
            "wait": lambda: handle.wait(),
            "close": lambda: fabric.close(),
            "close at once": lambda: fabric.close(drain=False),
        }
    )
    handle.wait()
    return found, fabric.all_reduce(torch.ones(3)).sum().item() + tensor.sum().item()


def trains(fabric: Fabric, mode: str) -> tuple[nn.Module, torch.optim.Optimizer, syncline.Sync]:
    """A model that has been trained for a step."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    one_step(fabric, model, optimizer, 1)
    return model, optimizer, sync


def one_step(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(batch(fabric.rank, step)).square().mean().backward()
    optimizer.step()


def training_in_a_child(
    fabric: Fabric, mode: str, forks: bool
) -> tuple[dict[str, tuple[str, float]], list[torch.Tensor]]:
    """What a child tries with the Sync of its parent, and the parameters of the parent some steps later."""
    model, optimizer, sync = trains(fabric, mode)
    found = {}
    if forks:
        found = in_child(
            {
                "step": lambda: optimizer.step(),
                "backward and step": lambda: one_step(fabric, model, optimizer, 2),
                "wait": lambda: sync.wait(),
                "drain": lambda: sync.drain(),
                "state_dict": lambda: sync.state_dict(),
                "close": lambda: sync.close(),
                "fabric": lambda: fabric.close(),
            }
        )
    if mode != "async":
        for step in (2, 3, 4):
            one_step(fabric, model, optimizer, step)
    sync.drain()
    sync.close()
    return found, [parameter.detach().clone() for parameter in model.parameters()]


class Meddles(torch.utils.data.Dataset):
    """Its samples are made with a collective, which only a rank may take part in."""

    def __init__(self, sync: syncline.Sync) -> None:
        self.sync = sync

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.sync.wait()
        return torch.ones(1)


def children_that_end(fabric: Fabric) -> tuple[list[int], str, float]:
    """Forked children that end in each way there is, and a worker of a DataLoader that meddles."""
    _, _, sync = trains(fabric, "sync")
    codes = []
    for end in (lambda: os._exit(3), lambda: sys.exit(4), lambda: None):
        child = os.fork()
        if child == 0:
            end()
            raise SystemExit(5)
        codes.append(ended_within(child, 20.0))
    other = multiprocessing.get_context("fork").Process(target=sync.wait)
    other.start()
    other.join(20.0)
    codes.append(other.exitcode)
    name, _ = outcome(lambda: list(torch.utils.data.DataLoader(Meddles(sync), num_workers=1)))
    return codes, name, fabric.all_reduce(torch.ones(3)).sum().item()
