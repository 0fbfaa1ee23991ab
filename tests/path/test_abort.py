"""Abort: what is under way ends at once on every rank, and the one that gave up is named."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import syncline
from support.catalogue import PROCESS_FABRICS
from syncline.errors import FabricError, PeerError

WORLD = 3
LATE = 1  # the rank that others wait for
PATIENCE_S = 5.0  # far less than the deadline; naming the culprit takes up to two seconds over Gloo


def interrupted(fabric: syncline.Fabric, codec: str, how: str, folder: str) -> tuple[str, int, float]:
    """How a pass ends that rank 0 gives up while it waits for a rank that is late, and after how long."""
    model = nn.Linear(50, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec)
    began = Path(folder) / "began"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which ranks of `run` leave to the one that started them
    try:
        for step in range(3):
            if step == 2 and fabric.rank == LATE:
                wait_for(began)
                time.sleep(0.3)  # the others have long been told by then
            if step == 2 and fabric.rank == 0:
                threading.Timer(0.3, give_up, (fabric, sync, how, began)).start()
            optimizer.zero_grad()
            model(torch.full((2, 50), 1.0 + fabric.rank)).sum().backward()
            optimizer.step()
    except KeyboardInterrupt:
        return "KeyboardInterrupt", 0, since(began)
    except FabricError as error:
        return type(error).__name__, error.rank if isinstance(error, PeerError) else -1, since(began)
    return "nothing", -1, 0.0


def give_up(fabric: syncline.Fabric, sync: syncline.Sync, how: str, began: Path) -> None:
    began.write_text(repr(time.time()))
    if how == "Ctrl-C":
        os.kill(os.getpid(), signal.SIGINT)
    else:
        sync.fabric.abort("was told to")


def wait_for(file: Path) -> None:
    until = time.monotonic() + 60.0
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.005)


def since(file: Path) -> float:
    return time.time() - float(file.read_text() or time.time())


@pytest.mark.parametrize("how", ["Ctrl-C", "abort"])
@pytest.mark.parametrize("codec", ["none", "fp16", "topk:0.1", "int8"])
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_what_waits_ends_at_once_on_all_ranks_when_one_gives_up(
    fabric: str, codec: str, how: str, tmp_path: Path
) -> None:
    work = partial(interrupted, codec=codec, how=how, folder=str(tmp_path))
    first, *others = syncline.run(work, WORLD, fabric, syncline.Deadlines(60.0))
    assert first[0] == ("KeyboardInterrupt" if how == "Ctrl-C" else "PeerAborted")
    for error, culprit, seconds in others:
        assert (error, culprit) == ("PeerAborted", 0)
        assert seconds < PATIENCE_S
