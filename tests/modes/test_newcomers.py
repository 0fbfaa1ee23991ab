"""A new process takes the place of a worker that died, as real processes: it has what the server has, and counts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

import syncline
from support import TESTS
from support.catalogue import one_now_others_slow
from support.on_a_line import RATE, START, slope_of
from support.patience import within
from support.replaced import (
    Replaced,
    Report,
    assert_replaced,
    begin_with,
    come_into_a_meeting,
    come_too_late,
    load_a_checkpoint,
    lose_a_server_for_good,
    refused_calls,
    servers_of,
)
from syncline.errors import ConfigError, JoinFailed, LayoutMismatch, PeerError, RankFailed
from syncline.fabric.membership import RejoinRequest
from syncline.fabric.shm import Meeting
from syncline.fabric.shm_membership import ShmMembership
from syncline.launch.failures import ProcessEnded

DEADLINES = syncline.Deadlines(4.0, join=20.0)
on_processes = pytest.mark.parametrize("fabric", ["shm", "torch"])


def run(
    work: Replaced, fabric: str, ranks: int, restarts: int, deadlines: syncline.Deadlines = DEADLINES
) -> list[Report]:
    return syncline.run(work, ranks, fabric, deadlines, keep_going=True, restarts=restarts)


ASYNC, BOUNDED = "async:share=false", "bounded:ahead=2,share=false"


@pytest.mark.parametrize(
    "case",
    one_now_others_slow(
        [
            (f"{BOUNDED},servers=2", "topk:0.3"),
            (ASYNC, "none"),
            (ASYNC, "topk:0.3"),
            (f"{ASYNC},servers=2", "none"),
            (f"{ASYNC},apart=true", "topk:0.3"),
            (f"{ASYNC},servers=2,apart=true", "none"),
            (BOUNDED, "none"),
            (f"{BOUNDED},apart=true", "none"),
            (f"{BOUNDED},servers=2,apart=true", "topk:0.3"),
        ]
    ),
)
@on_processes
def test_a_newcomer_has_what_the_servers_have_and_its_pushes_count(
    fabric: str, case: tuple[str, str], tmp_path: Path
) -> None:
    mode, codec = case
    victim = 1 if "apart" in mode else 2
    work = Replaced(mode, str(tmp_path), victim, codec)
    reports = run(work, fabric, 4, restarts=1)
    assert_replaced(reports, work)
    if mode.startswith("bounded"):
        reads = [read for server in servers_of(mode, 4) for read in reports[server].reads]
        assert max(read.clock - read.slowest for read in reads) <= 2


@pytest.mark.parametrize("end", ["exits", "fails"])
def test_it_does_not_matter_how_a_process_ended(end: str, tmp_path: Path) -> None:
    work = Replaced(ASYNC, str(tmp_path), ends=(end,))
    assert_replaced(run(work, "shm", 3, restarts=1), work)


@on_processes
def test_a_worker_may_die_again(fabric: str, tmp_path: Path) -> None:
    work = Replaced(BOUNDED, str(tmp_path), ends=("killed", "killed"), steps=3)
    assert_replaced(run(work, fabric, 3, restarts=2), work)


@pytest.mark.sampled(1)
def test_one_that_dies_too_often_is_a_failure_and_the_others_have_results(tmp_path: Path) -> None:
    work = Replaced(ASYNC, str(tmp_path), ends=("exits", "killed"), steps=3, others=250)
    with pytest.raises(RankFailed, match=r"(?s)SIGKILL.*before that, in the same rank:.*exited with code 3") as failed:
        run(work, "shm", 3, restarts=1)
    assert set(failed.value.failures) == {2}
    assert isinstance(failed.value.failures[2], ProcessEnded)
    assert set(failed.value.results) == {0, 1}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("moment", ["asking", "known", "entered", "reading"])
@on_processes
def test_a_newcomer_that_dies_while_it_enters_is_not_missed_and_the_next_one_comes(
    fabric: str, moment: str, tmp_path: Path
) -> None:
    work = Replaced(f"{BOUNDED},apart=true", str(tmp_path), victim=1, ends=("killed", "killed"), entering=moment)
    assert_replaced(run(work, fabric, 3, restarts=2), work)


@pytest.mark.slow
def test_a_newcomer_may_come_before_anyone_has_noticed_that_the_last_one_is_gone(tmp_path: Path) -> None:
    """It keeps its place when that is noticed."""
    work = Replaced(f"{ASYNC},apart=true", str(tmp_path), victim=1, steps=150, notices_s=1.5)
    assert_replaced(run(work, "shm", 3, restarts=1), work)


def test_a_server_ends_without_a_newcomer_that_knocked_and_died(tmp_path: Path) -> None:
    work = Replaced(ASYNC, str(tmp_path), ends=("killed", "killed"), entering="asking", others=150)
    with pytest.raises(RankFailed) as failed:
        run(work, "shm", 3, restarts=1, deadlines=syncline.Deadlines(4.0, join=60.0))
    assert set(failed.value.failures) == {2}
    assert set(failed.value.results) == {0, 1}
    assert max(report.seconds for report in failed.value.results.values()) < within(10.0, most=50.0)


@pytest.mark.sampled(1)
@on_processes
def test_a_newcomer_with_another_model_is_told_what_differs_and_not_started_again(fabric: str, tmp_path: Path) -> None:
    work = Replaced(ASYNC, str(tmp_path), width=5, others=250)
    with pytest.raises(RankFailed) as failed:
        run(work, fabric, 3, restarts=2)
    error = failed.value.failures[2]
    assert isinstance(error, LayoutMismatch)
    assert "-parameter first float32[3]" in str(error)
    assert "+parameter first float32[5]" in str(error)
    assert set(failed.value.results) == {0, 1}
    before = str(failed.value).partition("before that, in the same rank:")[2]
    assert before.strip() == "ProcessEnded: the process of rank 2 was ended by SIGKILL"


# What newcomers cannot do


@on_processes
def test_a_newcomer_takes_no_part_in_the_calls_of_the_others(fabric: str, tmp_path: Path) -> None:
    work = partial(refused_calls, folder=str(tmp_path))
    _, found = syncline.run(work, 2, fabric, DEADLINES, keep_going=True, restarts=1)
    assert len(found) == 10
    for name, outcome in found.items():
        assert outcome.kind == "FabricError", name
        assert "rank 1 came later (incarnation 1)" in outcome.message


@pytest.mark.parametrize("mode", ["sync", "delayed", "local:every=2", "slowmo:every=2", "diloco:every=2"])
def test_other_modes_refuse_a_newcomer(mode: str, tmp_path: Path) -> None:
    work = partial(begin_with, mode=mode, folder=str(tmp_path))
    _, found = syncline.run(work, 2, "shm", DEADLINES, keep_going=True, restarts=1)
    assert found.kind == "ConfigError"
    assert f"mode {mode.partition(':')[0]} needs all ranks from the start: use async or bounded" in found.message


@pytest.mark.sampled(2)
@on_processes
@pytest.mark.parametrize(("mode", "victim"), [("async:apart=true", 2), ("async", 0)])
def test_the_place_of_a_server_cannot_be_taken(fabric: str, mode: str, victim: int) -> None:
    work = partial(lose_a_server_for_good, mode=mode, victim=victim)
    with pytest.raises(RankFailed) as failed:
        syncline.run(work, 3, fabric, DEADLINES, keep_going=True, restarts=2)
    errors = failed.value.failures
    assert isinstance(errors[victim], ConfigError)
    assert f"rank {victim} is a server, and the parameters that it had were lost with it" in str(errors[victim])
    assert "was ended by SIGKILL" in str(failed.value)
    for rank in {0, 1, 2} - {victim}:
        assert isinstance(errors[rank], PeerError)
        assert f"the server on rank {victim}" in str(errors[rank])


# When newcomers come


@pytest.mark.sampled(2)
@on_processes
@pytest.mark.parametrize("saves", [False, True])
def test_a_newcomer_may_come_into_a_meeting(fabric: str, saves: bool, tmp_path: Path) -> None:
    work = partial(come_into_a_meeting, mode=ASYNC, folder=str(tmp_path), saves=saves)
    found = syncline.run(work, 3, fabric, DEADLINES, keep_going=True, restarts=1)
    assert [incarnation for incarnation, _, _ in found] == [0, 0, 1]
    place = torch.full((3,), START - RATE * (slope_of(0) + slope_of(1) + 2 * slope_of(2)))
    assert all(torch.equal(one, place) for _, one, _ in found)
    if saves:
        assert torch.equal(found[0][2]["first"], place)


@pytest.mark.sampled(1)
@on_processes
def test_one_that_comes_when_all_servers_have_ended_is_told(fabric: str, tmp_path: Path) -> None:
    work = partial(come_too_late, mode=ASYNC, folder=str(tmp_path))
    with pytest.raises(RankFailed) as failed:
        syncline.run(work, 3, fabric, syncline.Deadlines(3.0, join=2.0), keep_going=True, restarts=1)
    assert set(failed.value.failures) == {2}
    assert isinstance(failed.value.failures[2], JoinFailed)
    assert "rank 0 did not let it rejoin: it accepts nobody: it has ended" in str(failed.value.failures[2])
    assert max(failed.value.results.values()) < within(3.0)  # nobody waited for it


def test_a_newcomer_goes_on_from_the_servers_and_not_from_a_checkpoint(tmp_path: Path) -> None:
    work = partial(load_a_checkpoint, folder=str(tmp_path))
    found = syncline.run(work, 3, "shm", DEADLINES, keep_going=True, restarts=1)
    assert [incarnation for incarnation, _, _ in found] == [1, 0, 0]
    slopes = (2 + 4) * slope_of(0) + 4 * slope_of(1)
    assert all(torch.equal(place, torch.full((3,), START - RATE * slopes)) for _, place, _ in found[:2])


# Endpoints of shared memory


@pytest.fixture
def membership() -> ShmMembership:
    return ShmMembership(Meeting(), DEADLINES)


def test_one_that_has_asked_and_is_gone_is_found_out_at_once(membership: ShmMembership) -> None:
    wanted = RejoinRequest(1, 1)
    with closing(membership.endpoint("here")) as endpoint, closing(membership.attempt("here", wanted)) as attempt:
        attempt.ask()
        attempt.close()
        request = endpoint.poll()
        assert request == wanted
        began = time.monotonic()
        with pytest.raises(JoinFailed, match="rank 1 has asked to rejoin, and is gone"):
            endpoint.accept(request)
        assert time.monotonic() - began < within(1.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else needs root")
def test_other_users_are_not_heard(membership: ShmMembership) -> None:
    with closing(membership.endpoint("here")) as endpoint:
        stranger = os.fork()
        if not stranger:
            os.setuid(65534)
            membership.attempt("here", RejoinRequest(1, 1)).ask()
            os._exit(0)
        assert os.waitpid(stranger, 0)[1] == 0
        assert endpoint.poll() is None
        with closing(membership.attempt("here", RejoinRequest(1, 2))) as attempt:
            attempt.ask()
            assert endpoint.poll() == RejoinRequest(1, 2)


# Requests that are impossible


def nothing(fabric: syncline.Fabric) -> None:
    """Never begins."""


def test_restarts_need_ranks_that_go_on_and_processes() -> None:
    with pytest.raises(ConfigError, match="restarts=2 needs ranks that go on meanwhile; say keep_going=True"):
        syncline.run(nothing, 2, "shm", restarts=2)
    with pytest.raises(ConfigError, match=r"restarts=2 needs processes.*use fabric=\"shm\""):
        syncline.run(nothing, 2, "threads", keep_going=True, restarts=2)
    with pytest.raises(ConfigError, match="restarts=-1 is less than 0"):
        syncline.run(nothing, 2, "shm", keep_going=True, restarts=-1)


# Ranks that were started by hand

SCRIPT = """
import sys
from pathlib import Path
import syncline
from support.replaced import Replaced

fabric, mode, folder, rejoin = sys.argv[1:]
joined = syncline.init(fabric=fabric, deadlines=syncline.Deadlines(4.0, join=20.0), rejoin=rejoin == "again")
report = Replaced(mode, folder)(joined)
joined.close()
print(joined.name, report.incarnation, report.began > 0, *report.place.tolist(), flush=True)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", one_now_others_slow([ASYNC, f"{BOUNDED},servers=2"]))
@on_processes
def test_a_process_that_is_started_by_hand_takes_the_place_of_one(fabric: str, mode: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(rank: int, how: str) -> subprocess.Popen[str]:
        environment = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        paths = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), fabric, mode, str(tmp_path), how],
            env={**os.environ, **paths, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )

    ranks = [start(rank, "first") for rank in range(3)]
    try:
        assert ranks[2].wait(40) == -signal.SIGKILL
        ranks.append(start(2, "again"))
        printed = [rank.communicate(timeout=40)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [one[:3] for one in (printed[0], printed[1], printed[3])] == [
        [fabric, "0", "False"],
        [fabric, "0", "False"],
        [fabric, "1", "True"],
    ]
    assert printed[0][3:] == printed[1][3:] == printed[3][3:]


def test_rejoining_needs_the_environment_of_the_process_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="rejoin=True needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"):
        syncline.init(rejoin=True)
