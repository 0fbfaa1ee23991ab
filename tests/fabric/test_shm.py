"""What only the shared-memory fabric has: memory that peers reach, a native worker, and the ways it can go wrong."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import syncline
from support import TESTS
from support.patience import within
from support.processes import shared_memory_files
from support.reducing import finite_as_told
from support.references import all_same_bits, left_fold, noise, same_bits
from syncline.collectives.registry import ALGORITHMS
from syncline.errors import (
    ConfigError,
    Desync,
    FabricClosed,
    FabricError,
    JoinFailed,
    OutOfSharedMemory,
    PeerLost,
    PeerStalled,
    RankFailed,
)
from syncline.fabric.shm import Meeting, shm_fabric

MILLION = 1_000_003


def shm(work, ranks: int = 2, **settings) -> list:
    return syncline.run(work, ranks=ranks, fabric="shm", **settings)


# Answers


def reduce_in_both_kinds_of_memory(fabric, dtype: torch.dtype, op: str, lengths: list[int]) -> list[torch.Tensor]:
    """In shared memory, in private memory, and in an unaligned slice of shared memory."""
    results = []
    for length in lengths:
        mine = noise(fabric.rank, length, dtype)
        shared, sliced = fabric.buffer(length, dtype), fabric.buffer(length + 3, dtype)[3:]
        for tensor in (shared, mine.clone(), sliced):
            tensor.copy_(mine)
            results.append(fabric.all_reduce(tensor, op=op).clone())
    return results


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_are_the_left_fold_in_rank_order_wherever_they_lie(ranks, dtype):
    lengths = [0, 1, ranks - 1, ranks + 1, 1009, 40_009, 300_007]
    results = shm(partial(reduce_in_both_kinds_of_memory, dtype=dtype, op="mean", lengths=lengths), ranks)
    for number, length in enumerate(lengths):
        expected = left_fold("mean", [noise(rank, length, dtype) for rank in range(ranks)])
        for memory in range(3):
            assert all(same_bits(result[3 * number + memory], expected) for result in results)


def reduce_with_every_algorithm(fabric) -> dict[str, torch.Tensor]:
    results = {}
    for name in ALGORITHMS:
        bucket = fabric.buffer(MILLION)
        bucket.copy_(noise(fabric.rank, MILLION, torch.float32))
        results[name] = fabric.all_reduce(bucket, collective=name)[-1000:].clone()
    return results


def test_schedules_run_natively_on_large_buffers():
    results = shm(reduce_with_every_algorithm, 4)
    expected = left_fold("sum", [noise(rank, MILLION, torch.float32)[-1000:] for rank in range(4)])
    for name in ALGORITHMS:
        assert all_same_bits([result[name] for result in results]), name
        assert torch.allclose(results[0][name], expected, rtol=1e-4, atol=1e-4), name
    assert same_bits(results[0]["direct"], expected)


def call_ten_thousand_times(fabric) -> int:
    """Sizes from nothing to half a megabyte, each answer checked."""
    lengths = [0, 1, 5, 300, 4000, 20_000, 130_000]
    shared = fabric.buffer(max(lengths))
    private = torch.zeros(max(lengths))
    wrong = 0
    for turn in range(10_000):
        length = lengths[(turn * 7 + turn // 13) % (3 if turn % 50 else 7)]
        memory = shared if turn % 3 else private
        memory[:length] = turn % 100 + fabric.rank
        result = fabric.all_reduce(memory[:length])
        wrong += int((result != fabric.world * (turn % 100) + fabric.world * (fabric.world - 1) // 2).sum())
    return wrong


@pytest.mark.timeout(120)
def test_ten_thousand_calls_of_mixed_sizes():
    assert shm(call_ten_thousand_times, 3) == [0, 0, 0]


def use_two_groups(fabric, meeting: Meeting) -> list[float]:
    """Two groups over the same ranks, numbered in opposite directions, in turns."""
    other = shm_fabric(meeting, fabric.world - 1 - fabric.rank, fabric.world)
    found = []
    for turn in range(50):
        found.append(float(fabric.all_reduce(torch.full((1000,), float(fabric.rank + turn)))[-1]))
        found.append(float(other.all_reduce(torch.full((70_000,), float(other.rank * turn)))[-1]))
    other.close()
    return found


def test_two_groups_at_once():
    expected = [value for turn in range(50) for value in (3.0 + 3 * turn, 3.0 * turn)]
    assert shm(partial(use_two_groups, meeting=Meeting()), 3) == [expected] * 3


def call_from_threads(fabric) -> list[float]:
    """Each thread sums ones, so that whatever order they come in, all ranks make the same calls."""
    results: list[float] = []

    def work() -> None:
        for _ in range(200):
            results.append(float(fabric.all_reduce(torch.ones(500)).sum()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_calls_from_several_threads():
    assert shm(call_from_threads, 2) == [[1000.0] * 800] * 2


# Asynchronous calls


def start_many(fabric) -> list[float]:
    buckets = [fabric.buffer(200_003) for _ in range(6)]
    handles = []
    for number, bucket in enumerate(buckets):
        bucket.fill_(fabric.rank + number)
        collective = "ring" if number % 2 else "auto"
        handles.append(fabric.all_reduce_async(bucket, op="mean", collective=collective))
    after = float(fabric.all_reduce(torch.tensor([1.0])))  # behind those that are queued
    assert all(handle.done() for handle in handles)
    for handle in handles:
        handle.wait()
    return [after, *(float(bucket[-1]) for bucket in buckets)]


@pytest.mark.parametrize("fabric", ["shm", "torch", "threads"])
def test_asynchronous_calls_are_carried_out_in_order(fabric):
    results = syncline.run(start_many, ranks=3, fabric=fabric)
    assert results == [[3.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * 3


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("length", [100, 40_003])
def test_every_rank_knows_whether_the_result_is_finite(ranks, shared, length):
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    assert shm(partial(finite_as_told, dtypes=dtypes, length=length, shared=shared), ranks) == [[]] * ranks


def overflow(fabric) -> list[bool | None]:
    """Of a sum that overflows in its middle, and of a ring."""
    x = fabric.buffer(50_000)
    x[25_000] = 3e38
    overflown = fabric.all_reduce_async(x)
    ring = fabric.all_reduce_async(fabric.buffer(50_000), collective="ring")
    overflown.wait()
    ring.wait()
    return [overflown.finite(), ring.finite()]


def test_a_sum_that_overflows_is_not_finite_and_of_schedules_it_is_not_known():
    assert shm(overflow, 2) == [[False, None]] * 2
    assert shm(overflow, 1) == [[None, None]]


def start_a_column(fabric) -> list[float]:
    matrix = torch.full((100, 7), float(fabric.rank))
    handle = fabric.all_reduce_async(matrix[:, 3])
    handle.wait(10.0)
    return matrix.sum(0).tolist()


def test_asynchronous_calls_take_tensors_that_are_not_contiguous():
    one = [[100.0 * rank] * 7 for rank in range(2)]
    for row in one:
        row[3] = 100.0
    assert shm(start_a_column) == one


def wait_too_briefly(fabric) -> str:
    if fabric.rank == 0:
        time.sleep(1.0)
    handle = fabric.all_reduce_async(torch.ones(10))
    message = ""
    if fabric.rank == 1:
        with pytest.raises(FabricError) as caught:
            handle.wait(0.1)
        message = str(caught.value)
        assert not handle.done()
    handle.wait(20.0)
    return message


def test_a_handle_waits_no_longer_than_asked_and_can_be_waited_for_again():
    assert "not done after 0.1 s" in shm(wait_too_briefly)[1]


# Memory


def keep_a_buffer(fabric) -> float:
    buffer = fabric.buffer(1000)
    part = buffer[10:20]
    buffer.fill_(7.0)
    fabric.close()
    del buffer
    gc.collect()
    return float(part.sum())


def test_a_buffer_lives_as_long_as_any_tensor_on_it():
    assert shm(keep_a_buffer) == [70.0, 70.0]


def ask_for_too_much(fabric) -> tuple[str, float]:
    with pytest.raises(OutOfSharedMemory) as caught:
        fabric.buffer(10**13)
    return str(caught.value), float(fabric.all_reduce(torch.ones(3)).sum())


def test_too_large_a_buffer_is_a_clear_error_and_nothing_is_lost():
    for message, total in shm(ask_for_too_much):
        assert "40000000000000" in message
        assert total == 6.0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def create_and_close(fabric, meetings: list[Meeting]) -> tuple[int, int, int]:
    """How descriptors, threads and memory have grown between the fiftieth cycle and the last."""
    for number, meeting in enumerate(meetings):
        if number == 50:
            before = descriptors(), threading.active_count(), resident_kib()
        with shm_fabric(meeting, fabric.rank, fabric.world) as other:
            bucket = other.buffer(50_000)
            other.all_reduce_async(bucket).wait()
    return descriptors() - before[0], threading.active_count() - before[1], resident_kib() - before[2]


@pytest.mark.looks_at_shm
@pytest.mark.timeout(180)
def test_three_hundred_cycles_leave_nothing_behind():
    shared_files = shared_memory_files()
    for grown_descriptors, grown_threads, grown_kib in shm(
        partial(create_and_close, meetings=[Meeting() for _ in range(300)])
    ):
        assert (grown_descriptors, grown_threads) == (0, 0)
        assert grown_kib < 4096
    assert shared_memory_files() == shared_files


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a full /dev/shm needs root")
def test_a_full_dev_shm_does_not_matter(tmp_path):
    """The memory has no file there; in a mount namespace of its own, /dev/shm is full and all is well."""
    program = tmp_path / "program.py"
    program.write_text(
        "import syncline\n"
        "from support.reducing import add_ones\n"
        "if __name__ == '__main__':\n"
        "    print(syncline.run(add_ones, ranks=2, fabric='shm'))\n"
    )
    fill = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    finished = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{fill} && exec {sys.executable} {program}"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "[2000000.0, 2000000.0]"


# Joining


def join_with(fabric, meetings: dict[int, Meeting]) -> str:
    try:
        shm_fabric(meetings[fabric.rank], fabric.rank, fabric.world, syncline.Deadlines(2.0, join=1.0)).close()
    except JoinFailed as error:
        return str(error)
    return ""


def test_a_rank_that_never_comes_is_named():
    absent = {0: (place := Meeting()), 1: Meeting(), 2: place}
    messages = shm(partial(join_with, meetings=absent), 3)
    assert all(messages)
    assert "1" in messages[0]


def test_more_ranks_than_possible_are_refused():
    with pytest.raises(ConfigError, match="65 ranks are more than 64"):
        shm_fabric(Meeting(), 0, 65)


def use_after_fork(fabric) -> tuple[int, float]:
    """A forked child may not use the group, and does not disturb it."""
    child = os.fork()
    if child == 0:
        try:
            fabric.all_reduce(torch.ones(1))
        except FabricClosed:
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), float(fabric.all_reduce(torch.ones(1)))


def test_a_forked_child_is_refused():
    assert shm(use_after_fork) == [(7, 2.0), (7, 2.0)]


def use_after_close(fabric) -> str:
    fabric.close()
    fabric.close()
    with pytest.raises(FabricClosed) as caught:
        fabric.barrier()
    return str(caught.value)


def test_a_closed_fabric_says_so():
    assert all("closed" in message for message in shm(use_after_close))


# Faults, with real processes; faults at every phase inside a call are in native/tests/fault_test.cc


def work_until_struck(fabric, victim: int, strike: signal.Signals, in_background: bool) -> None:
    """Call without pause; rank `victim` is struck by a timer at some moment of it. The error says how long it took."""
    bucket = fabric.buffer(500_000)
    if fabric.rank == victim:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), strike))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    while True:
        started = time.monotonic()
        try:
            if in_background:
                fabric.all_reduce_async(bucket).wait()
            else:
                fabric.all_reduce(bucket)
        except FabricError as error:
            error.seconds = time.monotonic() - started
            raise


@pytest.mark.sampled(3)
@pytest.mark.parametrize("in_background", [False, True], ids=["caller", "worker"])
@pytest.mark.parametrize(("strike", "kind"), [(signal.SIGKILL, PeerLost), (signal.SIGSTOP, PeerStalled)])
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_name_the_rank_that_was_struck(victim, strike, kind, in_background):
    work = partial(work_until_struck, victim=victim, strike=strike, in_background=in_background)
    with pytest.raises(RankFailed) as caught:
        shm(work, 3, deadlines=syncline.Deadlines(deadline_s := within(1.0)))
    survivors = {rank: error for rank, error in caught.value.failures.items() if rank != victim}
    assert len(survivors) == 2
    for error in survivors.values():
        assert (type(error), error.rank) == (kind, victim)
        assert error.seconds < deadline_s + within(1.0)


def differ_then_agree(fabric) -> tuple[str, float]:
    with pytest.raises(Desync) as caught:
        fabric.all_reduce(fabric.buffer(10 + fabric.rank))
    return str(caught.value), float(fabric.all_reduce(torch.ones(1)))


def test_different_calls_are_refused_and_the_fabric_goes_on():
    for message, total in shm(differ_then_agree):
        assert "float32[10]" in message
        assert "float32[11]" in message
        assert total == 2.0


# Falling back


SCRIPT = """
import logging, resource, sys
import torch, syncline
from syncline.fabric import shm

logging.basicConfig(level=logging.INFO)
wish = sys.argv[1]
if wish == "no native module":
    shm.missing = syncline.launch.init.__globals__["missing"] = lambda: "the native module was not built"
if wish == "few descriptors":
    fabric = syncline.init(fabric="torch")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(__import__("os").listdir("/proc/self/fd")) + 1,) * 2)
    fabric = syncline.launch.init.__globals__["share_memory"](fabric)
else:
    if wish == "no locked memory":
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    fabric = syncline.init(deadlines=syncline.Deadlines(20.0))
total = fabric.all_reduce(torch.full((100_000,), 1.0 + fabric.rank)).sum()
print(fabric.name, int(total), flush=True)
fabric.barrier()
fabric.close()
"""


def start_ranks(folder: Path, wishes: list[str], prefixes: list[list[str]]) -> list[tuple[str, str]]:
    """Two ranks as torchrun would start them, each behind a command of its own; what each printed."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank, (wish, prefix) in enumerate(zip(wishes, prefixes, strict=True)):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(
            subprocess.Popen(
                [*prefix, sys.executable, str(script), wish],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [rank.communicate(timeout=50) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return outputs


def test_ranks_of_one_host_share_memory(tmp_path):
    for said, _ in start_ranks(tmp_path, ["", ""], [[], []]):
        assert said.split() == ["shm", "300000"]


def test_no_locked_memory_is_needed(tmp_path):
    for said, _ in start_ranks(tmp_path, ["no locked memory"] * 2, [[], []]):
        assert said.split() == ["shm", "300000"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wish", ["no native module", "few descriptors"])
def test_all_ranks_fall_back_when_one_cannot(tmp_path, wish):
    outputs = start_ranks(tmp_path, ["few descriptors" if wish == "few descriptors" else "", wish], [[], []])
    for said, logged in outputs:
        assert said.split() == ["torch", "300000"], logged


@pytest.mark.sampled(1)
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
@pytest.mark.parametrize("space", ["--ipc", "--mount"])
def test_ranks_in_different_namespaces_fall_back(tmp_path, space):
    for said, logged in start_ranks(tmp_path, ["", ""], [[], ["unshare", space]]):
        assert said.split() == ["torch", "300000"]
        assert "2 hosts" in logged
