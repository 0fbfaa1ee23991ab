"""What only the torch fabric has: an engine, process groups, torchrun."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import syncline
from support.catalogue import ENGINES, one_now_others_slow
from support.reducing import (
    closes_in_flight,
    differs_in_the_middle,
    engine_calls_at_once,
    finite_as_told,
    maximum_with_nan,
    reduce_a_large_buffer,
)
from support.references import all_same_bits, closed_form, same_bits
from support.starting import hosts_as_told, joins_existing_group, not_a_member, number_of_threads, reduces_in_a_part
from syncline.collectives.execute import HALVES
from syncline.collectives.registry import ALGORITHMS
from syncline.errors import ConfigError, FabricError, UnknownName
from syncline.fabric.base import Fabric
from syncline.fabric.calls import DTYPES
from syncline.fabric.divide import divide, divide_plainly, mean_of_halves, mean_of_halves_plainly
from syncline.fabric.hosts import digest, host_key
from syncline.fabric.torch import TorchTransport, torch_fabric

COLLECTIVES = (*ALGORITHMS, "auto", "engine")


# The engine, and real sizes


@pytest.mark.timeout(120)
def test_buffers_of_several_default_segments() -> None:
    for results in zip(*syncline.run(partial(reduce_a_large_buffer, collectives=COLLECTIVES), 3, "torch"), strict=True):
        assert all(same_bits(result, closed_form("mean", 3, 1_000_003, torch.float32)) for result in results)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_maximum_is_nan_where_any_rank_has_nan(collective: str) -> None:
    results = syncline.run(partial(maximum_with_nan, collective=collective), 4, "torch")
    assert all_same_bits(results)
    assert results[0].isnan().tolist() == [position < 4 for position in range(100)]


@pytest.mark.parametrize("length", [1, 1000, 1_000_003])
def test_engine_calls_in_flight_take_effect_in_order(length: int) -> None:
    total, others = closed_form("sum", 3, length, torch.float32), closed_form("sum", 3, 50, torch.float32)
    for results in syncline.run(partial(engine_calls_at_once, length=length), 3, "torch"):
        assert all(same_bits(result, total) for result in results[:-1])
        assert same_bits(results[-1], others)


def test_an_engine_call_that_differs_is_refused_while_others_are_in_flight() -> None:
    for outcomes in syncline.run(partial(differs_in_the_middle, odd=1), 3, "torch"):
        assert outcomes == ["nothing 3", "nothing 3", "Desync 1", "nothing 3", "nothing 3"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("again", one_now_others_slow(range(20)))  # Gloo was left with half a message once in fifteen
def test_closing_without_drain_ends_what_is_in_flight_and_what_waits(tmp_path: Path, again: int) -> None:
    left, *others = syncline.run(partial(closes_in_flight, folder=str(tmp_path)), 3, "torch")
    assert left[-1] == "FabricClosed"
    assert set(left) <= {"nothing", "FabricClosed"}
    for outcomes in others:
        assert outcomes[-1] == "PeerLost"
        assert set(outcomes) <= {"nothing", "PeerLost"}


def test_the_division_of_a_mean_sees_whether_all_is_finite() -> None:
    work = partial(
        finite_as_told, dtypes=(torch.float32, torch.float64), length=3001, shared=False, collective="engine"
    )
    assert syncline.run(work, 3, "torch") == [[]] * 3


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in HALVES])  # whose sums are of float32
def test_the_native_division_equals_its_twin(dtype: torch.dtype) -> None:
    values = torch.randn(5000, dtype=torch.float64).mul(1e6).to(dtype)
    natively, plainly = values.clone(), values.clone()
    assert divide(natively, 3) in (True, None)
    divide_plainly(plainly, 3)
    assert same_bits(natively, plainly)


def test_every_engine_is_known() -> None:
    assert TorchTransport.name in ENGINES


# Hosts


def test_ranks_of_one_machine_share_a_host() -> None:
    assert syncline.run(partial(hosts_as_told, names=["", "", ""]), 3, "torch") == [((0, 1, 2),)] * 3


def test_ranks_find_out_who_shares_a_host_wherever_they_are() -> None:
    found = syncline.run(partial(hosts_as_told, names=["b", "a", "b", "c", "a"]), 5, "torch")
    assert found == [((0, 2), (1, 4), (3,))] * 5


def test_a_host_key_fits_an_int64_and_is_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_key() == host_key()
    monkeypatch.setenv("SYNCLINE_HOST", "elsewhere")
    assert host_key() == digest("elsewhere") != digest("elsewher")
    assert all(0 <= digest(name * 50) < 2**63 for name in map(chr, range(200, 400)))


def test_processes_share_the_cores() -> None:
    threads = syncline.run(number_of_threads, 5, "torch")
    assert threads == [max(1, (torch.multiprocessing.cpu_count()) // 5)] * 5


# Process groups


def test_init_uses_the_process_group_that_exists() -> None:
    results = syncline.run(partial(joins_existing_group, fabric_name="torch"), 3, "torch")
    assert results == [("torch", rank, 3, [6]) for rank in range(3)]


def test_a_fabric_over_some_of_the_ranks() -> None:
    results = syncline.run(partial(reduces_in_a_part, members=[1, 3, 4]), 5, "torch")
    assert results == [None, [0, 3, 8], None, [1, 3, 8], [2, 3, 8]]


def test_a_fabric_needs_membership() -> None:
    messages = syncline.run(not_a_member, 2, "torch")
    assert messages[0] == ""
    assert "not a member of the process group" in messages[1]


def test_a_fabric_needs_a_process_group() -> None:
    with pytest.raises(ConfigError, match=r"no process group; call syncline.init\(\)"):
        torch_fabric()


# init


def test_outside_torchrun_init_is_a_world_of_one_that_works() -> None:
    fabric = syncline.init()
    assert (fabric.rank, fabric.world, fabric.hosts) == (0, 1, ((0,),))
    assert syncline.current() is fabric
    for collective in COLLECTIVES:
        assert fabric.all_reduce(torch.arange(5), op="mean", collective=collective).tolist() == [0, 1, 2, 3, 4]
    assert fabric.all_gather(torch.ones(2)).shape == (1, 2)
    assert fabric.all_to_all(fabric.reduce_scatter(fabric.broadcast(torch.ones(2)))).tolist() == [1.0, 1.0]
    fabric.barrier()
    fabric.close()


def test_init_suggests_the_nearest_fabric() -> None:
    with pytest.raises(UnknownName, match="did you mean torch"):
        syncline.init(fabric="troch")


SCRIPT = """
    import sys
    import torch
    import torch.distributed as dist
    import syncline
    from syncline.current import resolve

    if sys.argv[1] == "own-group":
        dist.init_process_group("gloo")
    with syncline.init(fabric=sys.argv[2]) as fabric:
        assert syncline.current() is resolve("auto") is fabric
        x = torch.full((1000,), float(fabric.rank))
        for collective in ("ring", "auto", "engine"):
            x.fill_(fabric.rank)
            fabric.all_reduce(x, op="sum", collective=collective)
            assert x.tolist() == [1.0] * 1000, (collective, x)
        print(f"{fabric.name} {fabric.rank} of {fabric.world} on {fabric.hosts}\\n", end="", flush=True)
        fabric.barrier()
    if sys.argv[1] == "own-group" and fabric.name == "torch":
        assert dist.is_initialized()
        dist.destroy_process_group()
"""


@pytest.mark.sampled(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_mean_of_halves_is_added_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 10_007, generator=torch.Generator().manual_seed(0)).mul_(9000).to(dtype)
    native, plainly = rows.clone(), rows.clone()
    mean_of_halves(native)
    mean_of_halves_plainly(plainly)
    assert same_bits(native, plainly)
    assert same_bits(native[0], sum(row.float() for row in rows).div(5).to(dtype))


def means_of_halves_in_flight(fabric: Fabric, lengths: list[int]) -> list[Tensor]:
    """Several direct means of 16-bit values, begun at once and waited for from the last to the first."""
    channel, tensors = fabric.channel(), [(torch.arange(n) % 977 * (fabric.rank + 1) / 3).half() for n in lengths]
    handles = [channel.all_reduce(tensor, "mean", "direct") for tensor in tensors]
    for handle in reversed(handles):
        handle.wait()
        assert handle.done()
        assert handle.times().ended_ns > handle.times().began_ns
    return tensors


def test_means_of_halves_in_flight_are_those_of_their_own_call() -> None:
    lengths = [1, 300_000, 7, 300_000, 500_001, 1000, 300_000]
    for means in syncline.run(partial(means_of_halves_in_flight, lengths=lengths), 3, "torch"):
        for length, mean in zip(lengths, means, strict=True):
            numbers = torch.arange(length) % 977
            assert same_bits(mean, sum((numbers * rank / 3).half().float() for rank in (1, 2, 3)).div(3).half())


def waits_for_nobody(fabric: Fabric) -> str:
    """The error of a wait for a mean of 16-bit values that rank 1 begins later."""
    channel, values = fabric.channel(), torch.ones(1000).half()
    channel.all_reduce(values, "mean", "direct").wait()
    if fabric.rank == 1:
        time.sleep(0.5)
    handle, told = channel.all_reduce(values, "mean", "direct"), ""
    if fabric.rank == 0:
        with pytest.raises(FabricError, match=r"not done after 0\.05 s") as caught:
            handle.wait(0.05)
        told = str(caught.value)
    handle.wait()
    return told


def test_a_wait_for_a_mean_of_halves_ends_in_time() -> None:
    assert "goes on" in syncline.run(waits_for_nobody, 2, "torch")[0]


@pytest.mark.parametrize(
    ("group", "fabric"),
    [
        ("own-group", "torch"),
        ("no-group", "auto"),
        pytest.param("no-group", "torch", marks=pytest.mark.slow),
        pytest.param("own-group", "auto", marks=pytest.mark.slow),
    ],
)
def test_torchrun(tmp_path: Path, group: str, fabric: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, str(script), group, fabric], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition(" ")[2] for line in done.stdout.splitlines() if " of " in line)
    assert said == ["0 of 2 on ((0, 1),)", "1 of 2 on ((0, 1),)"]


def two_over_one_group(fabric: Fabric) -> list[float]:
    """Two fabrics over one process group make subgroups of the same ranks."""
    others = [torch_fabric(fabric.transport.process_group, fabric.deadlines) for _ in range(2)]
    made = [group for other in others for group in (other.subgroup(), other.subgroup([1, 0]))]
    return [float(group.all_reduce(torch.ones(3))[0]) for group in made]


def test_fabrics_over_one_group_do_not_meet_in_each_others_subgroups() -> None:
    assert (
        syncline.run(two_over_one_group, ranks=2, fabric="torch", deadlines=syncline.Deadlines(20.0)) == [[2.0] * 4] * 2
    )
