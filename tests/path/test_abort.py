"""Abort: what is under way ends at once on every rank, and the one that gave up, died or stopped is named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import syncline
from support.catalogue import FABRICS, PROCESS_FABRICS, one_now_others_slow
from support.faulty import remove
from support.striking import be_killed, be_stopped
from support.telling import tell, wait_for
from syncline.errors import FabricError, PeerError, RankFailed
from syncline.fabric.threads import Threads

WORLD = 3
LATE = 1  # the rank that others wait for
PATIENCE_S = 5.0  # far less than the deadline; naming the culprit takes up to two seconds over Gloo
DEADLINE_S = 2.0  # where nobody but the deadline says that a rank is stopped
CODECS = ["none", "fp16", "topk:0.1", "int8"]
one_codec = pytest.mark.parametrize(
    "codec", one_now_others_slow(["int8", "topk:0.1", "fp16", "none"])
)  # int8 asks twice


def train(fabric: syncline.Fabric, codec: str, folder: str, before: Callable[[syncline.Sync], None]) -> str:
    """Make three steps, in the last of which each rank does something before its backward pass; the error, and whom."""
    model = nn.Linear(50, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec)
    try:
        for step in range(3):
            loss = model(torch.full((2, 50), 1.0 + fabric.rank)).sum()
            if step == 2:
                before(sync)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except FabricError as error:
        return f"{type(error).__name__} {error.rank if isinstance(error, PeerError) else ''}"
    finally:
        tell(folder, f"rank {fabric.rank} is through")
    return "nothing"


def stay(fabric: syncline.Fabric, folder: str, without: int | None) -> None:
    """Until all have noticed, so that nobody notices only because this rank leaves."""
    wait_for(folder, *(f"rank {rank} is through" for rank in range(fabric.world) if rank != without))


def since(folder: str) -> float:
    """Seconds since the moment that all should notice."""
    return time.time() - float(Path(folder, "moment").read_text())


def mark(folder: str) -> None:
    """This is the moment."""
    Path(folder, "written").write_text(repr(time.time()))
    os.rename(Path(folder, "written"), Path(folder, "moment"))


# A rank gives up while it waits with the others for one that is late, or stopped


def interrupted(fabric: syncline.Fabric, codec: str, how: str, late: str, folder: str) -> tuple[str, float]:
    """How a pass ends that rank 0 gives up, and after how long."""
    if fabric.name != "threads":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which ranks of `run` leave to the one that started
    pids = fabric.all_gather(torch.tensor([os.getpid()])).flatten().tolist()

    def give_up(sync: syncline.Sync) -> None:
        mark(folder)
        if how == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            sync.fabric.abort("was told to")

    def before(sync: syncline.Sync) -> None:
        if fabric.rank == 0:
            threading.Timer(0.3, give_up, (sync,)).start()
        if fabric.rank == LATE and late == "stopped":
            be_stopped()
        elif fabric.rank == LATE:
            wait_for(folder, "moment")
            time.sleep(0.3)  # the others have long been told by then

    ended = train(fabric, codec, folder, before)
    seconds = since(folder)
    stay(fabric, folder, without=LATE if late == "stopped" else None)
    if late == "stopped":
        remove(pids[LATE])  # a stopped process would be waited for
    return ended, seconds


GIVES_UP = [*((fabric, how) for fabric in PROCESS_FABRICS for how in ("Ctrl-C", "abort")), ("threads", "abort")]


@pytest.mark.parametrize(("fabric", "how"), GIVES_UP)
@pytest.mark.parametrize("codec", CODECS)
def test_what_waits_ends_at_once_on_all_ranks_when_one_gives_up(
    fabric: str, codec: str, how: str, tmp_path: Path
) -> None:
    work = partial(interrupted, codec=codec, how=how, late="slow", folder=str(tmp_path))
    first, *others = syncline.run(work, WORLD, fabric, syncline.Deadlines(60.0))
    assert first[0] == ("KeyboardInterrupt" if how == "Ctrl-C" else "PeerAborted 0")
    for ended, seconds in others:
        assert ended == "PeerAborted 0"
        assert seconds < PATIENCE_S


@one_codec
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_an_abort_reaches_all_though_a_peer_is_stopped(fabric: str, codec: str, tmp_path: Path) -> None:
    work = partial(interrupted, codec=codec, how="abort", late="stopped", folder=str(tmp_path))
    with pytest.raises(RankFailed, match="was ended by SIGKILL") as caught:
        syncline.run(work, WORLD, fabric, syncline.Deadlines(60.0))
    assert list(caught.value.failures) == [LATE]
    for ended, seconds in caught.value.results.values():
        assert ended == "PeerAborted 0"
        assert seconds < PATIENCE_S


# A rank is struck while the others wait for it


def struck(fabric: syncline.Fabric, codec: str, how: str, folder: str) -> tuple[str, float]:
    """How a pass ends in which a rank dies or is stopped, and after how long."""
    pids = fabric.all_gather(torch.tensor([os.getpid()])).flatten().tolist()

    def before(_: syncline.Sync) -> None:
        if fabric.rank != LATE:
            return
        time.sleep(0.3)  # the others have sent their buckets, and wait
        mark(folder)
        if fabric.name != "threads":
            be_killed() if how == "killed" else be_stopped()
        if how == "killed":
            raise ValueError("this rank goes")
        wait_for(folder, *(f"rank {rank} is through" for rank in range(WORLD) if rank != LATE))

    ended = train(fabric, codec, folder, before)
    seconds = since(folder)
    stay(fabric, folder, without=LATE)
    if fabric.name != "threads" and how == "stopped" and fabric.rank != LATE:
        remove(pids[LATE])
    return ended, seconds


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_peer_that_dies_ends_the_wait_of_all(fabric: str, codec: str, tmp_path: Path) -> None:
    """Long before the deadline."""
    with pytest.raises(RankFailed) as caught:
        syncline.run(
            partial(struck, codec=codec, how="killed", folder=str(tmp_path)), WORLD, fabric, syncline.Deadlines(60.0)
        )
    assert list(caught.value.failures) == [LATE]
    assert len(caught.value.results) == WORLD - 1
    for ended, seconds in caught.value.results.values():
        assert ended == f"PeerLost {LATE}"
        assert seconds < PATIENCE_S


@one_codec
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_peer_that_is_stopped_ends_the_wait_of_all_at_the_deadline(fabric: str, codec: str, tmp_path: Path) -> None:
    work = partial(struck, codec=codec, how="stopped", folder=str(tmp_path))
    deadlines = syncline.Deadlines(DEADLINE_S, join=30.0)
    if fabric == "threads":
        results = dict(enumerate(syncline.run(work, WORLD, fabric, deadlines)))
        del results[LATE]
    else:
        with pytest.raises(RankFailed, match="was ended by SIGKILL") as caught:
            syncline.run(work, WORLD, fabric, deadlines)
        assert list(caught.value.failures) == [LATE]
        results = caught.value.results
    assert len(results) == WORLD - 1
    for ended, seconds in results.values():
        assert ended == f"PeerStalled {LATE}"
        assert seconds < DEADLINE_S + PATIENCE_S


# What is aborted


def test_an_abort_ends_all_that_was_made_from_the_fabric() -> None:
    with Threads().group(1).fabric(0) as fabric:
        child, channel = fabric.subgroup(), fabric.channel("of its own")
        fabric.abort("gives up")
        transports = [fabric.transport, child.transport, channel.transport]
        assert len(set(transports)) == 3
        for transport in transports:
            assert str(transport.shared.failure) == "rank 0 gives up"
