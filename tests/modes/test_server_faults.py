"""Workers and servers that are killed or stopped, as real processes: the others go on, or are told who is lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import syncline
from support.catalogue import one_now_others_slow
from support.on_a_line import RATE, START, Descent, slope_of
from support.patience import within
from support.processes import shared_memory_files
from support.replaced import Replaced, assert_replaced
from support.served import LOCKSTEP, How, with_nan
from support.struck import HALTS, MOMENTS, Halt, Strike, halt_a_server, lose_a_server, survive
from syncline.errors import PeerError, PeerLost, RankFailed
from syncline.launch.failures import ProcessEnded, ProcessStopped
from syncline.modes.serving import link as link_module
from syncline.modes.serving.link import FabricLink, Kind, Message

CPU = torch.device("cpu")
DEADLINES = syncline.Deadlines(3.0, join=60.0)


@pytest.fixture(scope="module")
def started_before() -> None:
    """What the first run of all leaves open for the next ones."""
    for fabric in ("shm", "torch"):
        syncline.run(rank_of, ranks=1, fabric=fabric)


@pytest.fixture
def nothing_open(started_before: None) -> Iterator[None]:
    """No file of shared memory, no descriptor is left."""
    shared, descriptors = shared_memory_files(), len(os.listdir("/proc/self/fd"))
    yield
    assert shared_memory_files() == shared
    assert len(os.listdir("/proc/self/fd")) <= descriptors


pytestmark = pytest.mark.looks_at_shm
LOST = [("async:apart=true", 2), ("async", 0), ("bounded:ahead=1,servers=2", 1)]


def rank_of(fabric: syncline.Fabric) -> int:
    return fabric.rank


def assert_survivors(mode: str, strike: Strike, fabric: str, world: int = 3) -> dict[int, tuple]:
    steps = 6
    work = partial(survive, mode=mode, strike=strike, steps=steps)
    with pytest.raises(RankFailed) as failed:
        syncline.run(work, ranks=world, fabric=fabric, deadlines=DEADLINES, keep_going=True)
    assert set(failed.value.failures) == {strike.victim}, failed.value
    assert type(failed.value.failures[strike.victim]) is (ProcessStopped if strike.stops else ProcessEnded)
    rest = [rank for rank in range(world) if rank != strike.victim]
    has_committed = strike.moment == "reading" or (strike.stops and strike.moment == "waiting")
    full = strike.step + has_committed  # steps of the victim that count
    slopes = full * slope_of(strike.victim) + steps * sum(map(slope_of, rest))
    if mode.startswith(LOCKSTEP):
        slopes = full * sum(map(slope_of, range(world))) / world + (steps - full) * sum(map(slope_of, rest)) / len(rest)
    for place, took_s in failed.value.results.values():
        torch.testing.assert_close(place, torch.full((3,), START - RATE * slopes))
        assert took_s < within(3 * DEADLINES.operation)
    return failed.value.results


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fabric", ["shm", "torch"])
def test_a_worker_that_is_killed_is_not_missed(fabric: str, moment: str) -> None:
    found = assert_survivors(LOCKSTEP, Strike(2, moment), fabric)
    assert max(took_s for _, took_s in found.values()) < within(DEADLINES.operation)


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("moment", ["computing", "before commit", "reading"])
@pytest.mark.parametrize("mode", ["async:share=false", "bounded:ahead=1,share=false,servers=2"])
def test_what_a_killed_worker_has_committed_counts_and_nothing_else(mode: str, moment: str) -> None:
    assert_survivors(mode, Strike(2, moment), "shm")


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("moment", one_now_others_slow(["reading", "computing", "before commit", "waiting"]))
@pytest.mark.parametrize("fabric", ["shm", "torch"])
def test_a_worker_that_is_stopped_holds_up_the_others_until_the_deadline(fabric: str, moment: str) -> None:
    assert_survivors(LOCKSTEP, Strike(2, moment, stops=True), fabric)


def assert_all_workers_name(victim: int, work: Callable, ranks: int, fabric: str, within_s: float) -> None:
    """The server that is struck, and nobody else fails."""
    with pytest.raises(RankFailed) as failed:
        syncline.run(work, ranks=ranks, fabric=fabric, deadlines=DEADLINES, keep_going=True)
    assert set(failed.value.failures) == {victim}
    assert len(failed.value.results) == ranks - 1
    for outcome in failed.value.results.values():
        assert outcome is not None
        assert outcome.culprit == victim, outcome
        assert issubclass(getattr(syncline.errors, outcome.kind), PeerError)
        assert f"server on rank {victim}" in outcome.message
        assert outcome.seconds < within_s


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("fabric", ["shm", "torch"])
@pytest.mark.parametrize(("mode", "victim"), LOST)
def test_all_workers_are_told_of_a_server_that_is_lost(fabric: str, mode: str, victim: int) -> None:
    work = partial(lose_a_server, mode=mode, victim=victim)
    assert_all_workers_name(victim, work, 3, fabric, within_s=within(DEADLINES.operation))


HALTED = [("async:apart=true", 3), ("async", 0), ("bounded:ahead=1,servers=2", 1), (f"{LOCKSTEP},servers=2", 1)]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("moment", HALTS)
@pytest.mark.parametrize("case", one_now_others_slow(HALTED))
@pytest.mark.parametrize("fabric", ["shm", "torch"])
def test_all_workers_are_told_of_a_server_that_is_stopped(
    fabric: str, case: tuple[str, int], moment: str, tmp_path: Path
) -> None:
    mode, victim = case
    work = partial(halt_a_server, mode=mode, halt=Halt(victim, moment, str(tmp_path)))
    assert_all_workers_name(victim, work, 4, fabric, within_s=DEADLINES.operation + within(1.0))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("moment", HALTS)
@pytest.mark.parametrize("case", one_now_others_slow(HALTED))
@pytest.mark.parametrize("fabric", ["shm", "torch"])
def test_a_server_that_is_stopped_for_less_than_the_deadline_goes_on(
    fabric: str, case: tuple[str, int], moment: str, tmp_path: Path
) -> None:
    mode, victim = case
    halt = Halt(victim, moment, str(tmp_path), lasts_s=2.1)
    deadlines = syncline.Deadlines(halt.lasts_s + within(0.9), join=60.0)  # who ends it may be late on a busy machine
    found = syncline.run(partial(halt_a_server, mode=mode, halt=halt), ranks=4, fabric=fabric, deadlines=deadlines)
    assert found == [None] * 4


def test_a_server_that_is_lost_during_a_push_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the world: it is rank 0 of the pair."""
    send = link_module.FabricLink.send

    def sent(self: FabricLink, message: Message, deadline_s: float | None = None) -> None:
        if message.kind == Kind.PUSH and message.step == 2:
            raise PeerLost(0, "gone")
        send(self, message, deadline_s)

    monkeypatch.setattr(link_module.FabricLink, "send", sent)
    with pytest.raises(RankFailed) as failed:
        syncline.run(Descent("async:apart=true", (3,)), ranks=2, fabric="threads")
    error = failed.value.failures[0]
    assert isinstance(error, PeerLost)
    assert error.rank == 1
    assert "the server on rank 1" in str(error)


def strike_a_worker(draw: random.Random, fabric: str, folder: Path) -> None:
    """Killed or stopped, whichever it is, also the one that the others wait for."""
    mode = draw.choice(["async:share=false", LOCKSTEP, "bounded:ahead=1,share=false,servers=2"])
    moments = MOMENTS if mode == LOCKSTEP else [moment for moment in MOMENTS if moment != "waiting"]
    victim = draw.choice([2] if "servers=2" in mode else [1, 2])  # those that serve nobody
    strike = Strike(victim, draw.choice(moments), stops=draw.random() < 0.3, step=draw.randrange(5))
    assert_survivors(mode, strike, fabric)


def lose_any_server(draw: random.Random, fabric: str, folder: Path) -> None:
    mode, victim = draw.choice(LOST)
    work = partial(lose_a_server, mode=mode, victim=victim)
    assert_all_workers_name(victim, work, 3, fabric, within_s=within(DEADLINES.operation))


def stop_any_server(draw: random.Random, fabric: str, folder: Path) -> None:
    mode, victim = draw.choice(HALTED)
    work = partial(halt_a_server, mode=mode, halt=Halt(victim, draw.choice(HALTS), str(folder)))
    assert_all_workers_name(victim, work, 4, fabric, within_s=DEADLINES.operation + within(1.0))


def replace_a_worker(draw: random.Random, fabric: str, folder: Path) -> None:
    mode = draw.choice(["async:share=false", "bounded:ahead=2,share=false,servers=2"])
    work = Replaced(mode, str(folder), ends=tuple(draw.choices(["killed", "exits", "fails"], k=draw.randint(1, 2))))
    assert_replaced(syncline.run(work, 3, fabric, DEADLINES, keep_going=True, restarts=len(work.ends)), work)


def have_a_nan(draw: random.Random, fabric: str, folder: Path) -> None:
    how = How(draw.choice([LOCKSTEP, "async", "bounded:ahead=2"]), draw.choice(["none", "int8", "topk:0.2"]))
    for found in syncline.run(partial(with_nan, how=how), 3, fabric, DEADLINES):
        assert all(value.isfinite().all() for value in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("nothing_open")
def test_fifty_runs_with_random_faults_never_hang(tmp_path: Path) -> None:
    draw = random.Random(0)
    faults = [strike_a_worker, lose_any_server, stop_any_server, replace_a_worker, have_a_nan]
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        faults[number % len(faults)](draw, draw.choice(["shm", "shm", "torch"]), folder)
