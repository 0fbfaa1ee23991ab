"""`run`: results by rank, the first failure first, and no process left behind whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import syncline
from support import TESTS
from support.catalogue import FABRICS, PROCESS_FABRICS, one_now_others_slow
from support.patience import within
from support.processes import in_session, process_table, ranks_left, session_ends
from support.starting import (
    CannotTravel,
    ask_for_a_wrong_name,
    end_on,
    fail_on,
    fail_while_others_sleep,
    finds_current,
    rank_and_process,
    returns_what_cannot_travel,
    trains_with_a_data_loader,
    wait_until,
    waits_for_a_data_loader,
)
from support.striking import be_killed, stop_for_a_while, stop_for_good, take_longer
from syncline.current import resolve
from syncline.errors import ConfigError, FabricError, PeerLost, PeerStalled, RankFailed, UnknownName
from syncline.fabric.threads import Threads
from syncline.launch import processes
from syncline.launch.failures import ProcessEnded, ProcessStopped

everywhere = pytest.mark.parametrize("fabric", FABRICS)
over_processes = pytest.mark.parametrize("fabric", PROCESS_FABRICS)


# Results


@everywhere
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_results_are_in_order_of_rank(fabric: str, ranks: int) -> None:
    results = syncline.run(rank_and_process, ranks, fabric)
    assert [(rank, world) for rank, world, _ in results] == [(rank, ranks) for rank in range(ranks)]


@over_processes
def test_every_rank_is_a_process(fabric: str) -> None:
    processes = {process for _, _, process in syncline.run(rank_and_process, 3, fabric)}
    assert len(processes) == 3
    assert os.getpid() not in processes


def test_threads_are_all_in_this_process() -> None:
    assert {process for _, _, process in syncline.run(rank_and_process, 3, "threads")} == {os.getpid()}


def test_four_ranks_by_default() -> None:
    assert [(rank, world) for rank, world, _ in syncline.run(rank_and_process)] == [(rank, 4) for rank in range(4)]


@everywhere
def test_a_function_that_cannot_be_sent_runs_all_the_same(fabric: str) -> None:
    offset = 10
    assert syncline.run(lambda f: f.all_reduce(torch.tensor([f.rank + offset])).item(), 3, fabric) == [33] * 3


def test_ranks_of_threads_have_a_fabric_each_and_leave_none() -> None:
    assert syncline.run(finds_current, 3, "threads") == [True] * 3
    assert syncline.current() is None
    with pytest.raises(ConfigError, match=r"no fabric yet; call syncline.init\(\)"):
        resolve("auto")


def test_a_fabric_by_name_is_not_found_but_auto() -> None:
    with pytest.raises(ConfigError, match="'ring' is neither a fabric nor \"auto\""):
        resolve("ring")


# Requests that are impossible


@pytest.mark.parametrize("ranks", [0, -1])
def test_fewer_than_one_rank_is_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"ranks={ranks} is less than 1; try ranks=2"):
        syncline.run(rank_and_process, ranks, "threads")


def test_an_unknown_fabric_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown fabric .thread.; did you mean threads\?"):
        syncline.run(rank_and_process, 2, "thread")


def test_deadlines_given_to_run_are_those_of_its_setup() -> None:
    def deadline(fabric: syncline.Fabric) -> float:
        return fabric.deadlines.operation

    assert syncline.run(deadline, 2, Threads(), syncline.Deadlines(7.0)) == [7.0, 7.0]
    assert syncline.run(deadline, 2, Threads(deadlines=syncline.Deadlines(8.0))) == [8.0, 8.0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["operation", "join"])
def test_a_deadline_is_a_positive_time(name: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={seconds} s is not a positive time; try {name}=60.0"):
        syncline.Deadlines(**{name: seconds})


# Failures


@everywhere
def test_the_traceback_of_the_rank_that_failed_comes_first(fabric: str) -> None:
    with pytest.raises(RankFailed) as caught:
        syncline.run(partial(fail_on, rank=1, error=KeyError, argument="the reason"), 3, fabric)
    message, failures = str(caught.value), caught.value.failures
    assert message.startswith("rank 1 failed first:\n\nTraceback (most recent call last):")
    assert "in fail_on" in message
    assert message.index("KeyError: 'the reason'") < message.index("after that:")
    assert next(iter(failures)) == 1
    assert type(failures[1]) is KeyError
    assert failures[1].args == ("the reason",)
    assert all(isinstance(failures[rank], FabricError) for rank in (0, 2))
    assert all(re.search(rf"^  rank {rank}: Peer\w+: rank 1 ", message, re.MULTILINE) for rank in (0, 2))


@everywhere
def test_results_of_ranks_that_succeeded_are_kept(fabric: str) -> None:
    with pytest.raises(RankFailed) as caught:
        syncline.run(partial(fail_on, rank=2, error=ValueError, argument="late", barrier=False), 3, fabric)
    assert caught.value.results == {0: 0, 1: 1}
    assert list(caught.value.failures) == [2]


@over_processes
def test_an_exception_that_cannot_be_sent_is_told_as_text(fabric: str) -> None:
    with pytest.raises(RankFailed, match=r"CannotTravel: it stays here") as caught:
        syncline.run(partial(fail_on, rank=0, error=CannotTravel, argument="it stays here"), 2, fabric)
    assert str(caught.value.failures[0]) == "CannotTravel: it stays here"


@over_processes
def test_an_error_of_ours_arrives_as_it_was(fabric: str) -> None:
    with pytest.raises(RankFailed) as caught:
        syncline.run(ask_for_a_wrong_name, 2, fabric)
    error = caught.value.failures[0]
    assert type(error) is UnknownName
    assert error.near == ["ring"]


@over_processes
def test_a_result_that_cannot_be_sent_is_a_failure(fabric: str) -> None:
    with pytest.raises(RankFailed, match="pickle"):
        syncline.run(returns_what_cannot_travel, 2, fabric)


@over_processes
def test_a_rank_that_is_killed_is_named_with_its_signal(fabric: str) -> None:
    with pytest.raises(RankFailed, match="the process of rank 1 was ended by SIGKILL") as caught:
        syncline.run(partial(end_on, rank=1, end=be_killed), 3, fabric, syncline.Deadlines(4.0))
    failures = caught.value.failures
    assert type(failures[1]) is ProcessEnded
    assert (failures[1].rank, failures[1].exit_code) == (1, -signal.SIGKILL)
    assert [(type(failures[rank]), failures[rank].rank) for rank in (0, 2)] == [(PeerLost, 1)] * 2


@over_processes
def test_a_rank_that_exits_is_named_with_its_code(fabric: str) -> None:
    with pytest.raises(RankFailed, match="the process of rank 0 exited with code 7 before it had a result"):
        syncline.run(partial(end_on, rank=0, end=partial(os._exit, 7)), 2, fabric, syncline.Deadlines(4.0))


@over_processes
def test_sys_exit_in_a_rank_is_a_failure_of_that_rank(fabric: str) -> None:
    with pytest.raises(RankFailed, match="rank 0 failed first") as caught:
        syncline.run(partial(end_on, rank=0, end=partial(sys.exit, 3)), 2, fabric, syncline.Deadlines(4.0))
    assert type(caught.value.failures[0]) is SystemExit


@pytest.mark.parametrize("fabric", PROCESS_FABRICS[:1])
def test_the_others_are_stopped_even_if_they_do_not_listen(fabric: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match="one of four") as caught:
        syncline.run(partial(fail_while_others_sleep, rank=3, seconds=60.0), 4, fabric)
    assert time.monotonic() - started < within(20.0)
    assert list(caught.value.failures) == [3]
    assert ranks_left() == []


# Ranks that are stopped


def failed_with_stopped_ranks(tmp_path: Path, victims: list[int], fabric: str, keep_going: bool, meet: bool) -> dict:
    """The failures of a run; it ends in time after the last of the ranks that are not stopped."""
    work = partial(stop_for_good, victims=victims, folder=str(tmp_path), meet=meet)
    with pytest.raises(
        RankFailed, match=f"rank {victims[0]} failed first:\n\nthe process of rank .* was stopped"
    ) as caught:
        syncline.run(work, 3, fabric, syncline.Deadlines(2.0), keep_going)
    last = max(float(report.read_text()) for report in tmp_path.iterdir())
    assert time.monotonic() - last < within(processes.GRACE_S + processes.ENDING_S)
    assert ranks_left() == []
    assert [rank for rank, error in caught.value.failures.items() if type(error) is ProcessStopped] == victims
    assert caught.value.results == ({} if meet else {rank: rank for rank in range(3) if rank not in victims})
    return caught.value.failures


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 1.0)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("short_grace")
@over_processes
@pytest.mark.parametrize("keep_going", [False, True])
def test_a_stopped_rank_that_others_wait_for_is_killed_after_they_have_failed(
    tmp_path: Path, fabric: str, keep_going: bool
) -> None:
    failures = failed_with_stopped_ranks(tmp_path, [1], fabric, keep_going, meet=True)
    assert [(type(failures[rank]), failures[rank].rank) for rank in (0, 2)] == [(PeerStalled, 1)] * 2


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("short_grace")
@over_processes
@pytest.mark.parametrize(("keep_going", "victims"), [(True, [1]), (False, [0, 2])])
def test_stopped_ranks_are_killed_after_the_others_have_ended(
    tmp_path: Path, fabric: str, keep_going: bool, victims: list[int]
) -> None:
    assert list(failed_with_stopped_ranks(tmp_path, victims, fabric, keep_going, meet=False)) == victims


@pytest.mark.parametrize("fabric", PROCESS_FABRICS[:1])
@pytest.mark.parametrize("victims", [[1], [0, 1, 2]], ids=str)
def test_a_rank_that_is_stopped_for_a_while_only_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, fabric: str, victims: list[int]
) -> None:
    """When all are stopped, as by somebody who wants the machine for a while, there is no hurry at all."""
    monkeypatch.setattr(processes, "GRACE_S", 3.0 if victims == [1] else 0.3)
    assert syncline.run(partial(stop_for_a_while, victims=victims, seconds=1.0), 3, fabric) == [0, 1, 2]


@pytest.mark.parametrize("fabric", PROCESS_FABRICS[:1])
@pytest.mark.parametrize("keep_going", [False, True])
def test_a_rank_that_is_slow_is_waited_for(monkeypatch: pytest.MonkeyPatch, fabric: str, keep_going: bool) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.3)
    work = partial(take_longer, slow=1, seconds=1.5)
    assert syncline.run(work, 3, fabric, keep_going=keep_going) == [0, 1, 2]


# Ranks that start processes


@pytest.mark.sampled(2)
@over_processes
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True])
def test_ranks_have_data_loaders_with_workers(tmp_path: Path, fabric: str, start: str, persistent: bool) -> None:
    usual = multiprocessing.get_start_method()
    work = partial(trains_with_a_data_loader, folder=str(tmp_path), start=start, persistent=persistent, usual=usual)
    first, second = syncline.run(work, 2, fabric)
    assert first == second == pytest.approx([1 - 2 * 0.01 * 1.5 * (1.5 + 5.5)])
    assert len(os.listdir(tmp_path)) >= 4


@pytest.mark.parametrize("fabric", PROCESS_FABRICS[:1])
def test_workers_end_with_a_rank_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fabric: str) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.3)
    monkeypatch.setenv("SLOW_FOLDER", str(tmp_path))
    monkeypatch.setenv("SLOW_FAILS", "1")
    with pytest.raises(RankFailed, match="this rank fails"):
        syncline.run(lambda fabric: waits_for_a_data_loader(fabric), 2, fabric)  # a fork, which has this environment
    workers = {int(name) for name in os.listdir(tmp_path)}
    assert len(workers) == 2
    wait_until(lambda: not workers.intersection(process.pid for process in process_table()))
    assert not workers.intersection(process.pid for process in process_table() if process.state != "Z")


# Nothing is left behind


def test_a_rank_that_lives_is_seen() -> None:
    # The tests below look for processes; here is one to be found.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        assert [process.pid for process in ranks_left()] == [child.pid]
        assert [process.pid for process in in_session(child.pid)] == [child.pid]
        assert not session_ends(child.pid, within_s=0.1)
        child.communicate(b"\n")
    assert session_ends(child.pid, within_s=1.0)


@over_processes
def test_no_thread_is_left_in_this_process(fabric: str) -> None:
    before = threading.enumerate()  # multiprocessing may have had reason for one that stays
    syncline.run(rank_and_process, 2, fabric)
    assert set(threading.enumerate()) <= set(before)


@over_processes
def test_no_file_descriptor_is_left_in_this_process(fabric: str) -> None:
    syncline.run(rank_and_process, 2, fabric)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        syncline.run(rank_and_process, 2, fabric)
    assert len(os.listdir("/proc/self/fd")) == before


SCRIPT = """
    import signal
    import sys
    from functools import partial
    import syncline
    from support import starting

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born deaf to it
        folder, fabric, wait = sys.argv[1:]
        work = partial(starting.says_its_process_and_waits, folder=folder, wait=getattr(starting, wait))
        syncline.run(work, ranks=3, fabric=fabric, deadlines=syncline.Deadlines(40.0))
"""


def start_script(folder: Path, fabric: str, wait: str) -> subprocess.Popen:
    """A script that runs ranks, in a session of its own, when all three have started."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    (folder / "ranks").mkdir()
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    arguments = [sys.executable, str(script), str(folder / "ranks"), fabric, wait]
    child = subprocess.Popen(arguments, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 30.0
    while len(os.listdir(folder / "ranks")) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    ranks = {int(name) for name in os.listdir(folder / "ranks")}
    assert len(ranks) == 3
    assert ranks <= {process.pid for process in in_session(child.pid)}
    return child


@pytest.mark.sampled(1)
@pytest.mark.timeout(120)
@over_processes
@pytest.mark.parametrize("wait", one_now_others_slow(["wait_for_rank_0", "sleep"]))
def test_ranks_end_when_the_process_that_started_them_is_killed(tmp_path: Path, fabric: str, wait: str) -> None:
    with start_script(tmp_path, fabric, wait) as child:
        child.kill()
    assert session_ends(child.pid, within_s=5.0), in_session(child.pid)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS[:1])
def test_workers_of_ranks_end_when_the_process_that_started_those_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fabric: str
) -> None:
    (tmp_path / "workers").mkdir()
    monkeypatch.setenv("SLOW_FOLDER", str(tmp_path / "workers"))
    with start_script(tmp_path, fabric, "waits_for_a_data_loader") as child:
        wait_until(lambda: len(os.listdir(tmp_path / "workers")) == 6)
        assert {int(name) for name in os.listdir(tmp_path / "workers")} <= {one.pid for one in in_session(child.pid)}
        child.kill()
    assert session_ends(child.pid, within_s=5.0), in_session(child.pid)


@pytest.mark.sampled(1)
@pytest.mark.timeout(120)
@over_processes
@pytest.mark.parametrize("whom", one_now_others_slow(["its group", "the process"]))
def test_ctrl_c_ends_everything(tmp_path: Path, fabric: str, whom: str) -> None:
    with start_script(tmp_path, fabric, "wait_for_rank_0") as child:
        # A terminal interrupts the whole group, `kill -INT` only the process.
        (os.killpg if whom == "its group" else os.kill)(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=30.0)
    assert child.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert session_ends(child.pid, within_s=5.0), in_session(child.pid)


def test_the_process_table_holds_this_process() -> None:
    (mine,) = [process for process in process_table() if process.pid == os.getpid()]
    assert (mine.parent, mine.session) == (os.getppid(), os.getsid(0))
