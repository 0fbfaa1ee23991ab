"""What ranks do in tests. Light, because every process of a rank imports it: no pytest, no hypothesis."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from references import noise, whole_numbers
from torch import Tensor

import syncline
from syncline.current import resolve
from syncline.errors import ConfigError, FabricError, PeerError
from syncline.fabric.torch import TorchFabric

# Collectives


def cut_finely(fabric: syncline.Fabric) -> None:
    """Let short tensors travel in many chunks and segments."""
    fabric.segment_bytes, fabric.grain_bytes = 256, 16


class Case(NamedTuple):
    """One all-reduce of whole numbers."""

    collective: str
    length: int
    dtype: torch.dtype
    op: str


def reduce_whole_numbers(fabric: syncline.Fabric, case: Case) -> Tensor:
    cut_finely(fabric)
    x = whole_numbers(fabric.rank, fabric.world, case.length, case.dtype)
    return fabric.all_reduce(x, op=case.op, collective=case.collective)


def reduce_noise(fabric: syncline.Fabric, case: Case, seed: int = 0) -> Tensor:
    cut_finely(fabric)
    x = noise(fabric.rank, case.length, case.dtype, seed)
    return fabric.all_reduce(x, op=case.op, collective=case.collective)


def reduce_all(fabric: syncline.Fabric, cases: Iterable[Case], reduce: Callable[..., Tensor]) -> list[Tensor]:
    """Many all-reduces in one life of a rank."""
    return [reduce(fabric, case) for case in cases]


def rearranged(fabric: syncline.Fabric, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every collective that rearranges, of whole numbers. `length` is of the parts of all-to-all."""
    cut_finely(fabric)
    rank, world = fabric.rank, fabric.world
    mine = whole_numbers(rank, world, length, dtype)
    parts = whole_numbers(rank, world, length * world, dtype)
    return {
        "reduce_scatter": fabric.reduce_scatter(mine),
        "reduce_scatter mean": fabric.reduce_scatter(mine, op="mean"),
        "reduce_scatter max": fabric.reduce_scatter(mine, op="max"),
        "all_gather": fabric.all_gather(mine),
        "all_to_all": fabric.all_to_all(parts),
        "all_to_all twice": fabric.all_to_all(fabric.all_to_all(parts)),
        "unchanged": torch.cat([mine, parts]),
        **{f"broadcast {root}": fabric.broadcast(mine.clone(), root=root) for root in range(world)},
    }


def rotate(fabric: syncline.Fabric, count: int, length: int) -> list[Tensor]:
    """Send several tensors to the right at once and receive as many from the left."""
    right, left = (fabric.rank + 1) % fabric.world, (fabric.rank - 1) % fabric.world
    arriving = [torch.full((length,), -1.0) for _ in range(count)]
    under_way = [fabric.receive(tensor, left) for tensor in arriving]
    under_way += [fabric.send(torch.full((length,), 10.0 * fabric.rank + i), right) for i in range(count)]
    for pending in under_way:
        pending.wait()
    return arriving


def reduce_a_large_buffer(fabric: syncline.Fabric, collectives: Iterable[str]) -> list[Tensor]:
    """More than one segment of the default size for every chunk."""
    x = fabric.buffer(1_000_003)
    results = []
    for collective in collectives:
        x.copy_(whole_numbers(fabric.rank, fabric.world, len(x), x.dtype))
        results.append(fabric.all_reduce(x, op="mean", collective=collective).clone())
    return results


def maximum_with_nan(fabric: syncline.Fabric, collective: str) -> Tensor:
    """Every rank has one NaN, each at its own place."""
    x = noise(fabric.rank, 100, torch.float32)
    x[fabric.rank] = torch.nan
    return fabric.all_reduce(x, op="max", collective=collective)


def start_many(fabric: syncline.Fabric, lengths: Iterable[int]) -> list[Tensor]:
    """Start one all-reduce after the other, and wait for the last one first."""
    cut_finely(fabric)
    tensors = [whole_numbers(fabric.rank, fabric.world, length, torch.float32) for length in lengths]
    handles = [fabric.all_reduce_async(tensor, collective="ring") for tensor in tensors]
    for handle in reversed(handles):
        handle.wait()
    return tensors


# Faults


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank."""

    kind: str
    culprit: int | None
    message: str
    seconds: float


def outcome_of(call: Callable[[], object]) -> Outcome:
    """Call, and say what came of it."""
    started = time.monotonic()
    try:
        call()
    except (FabricError, ConfigError) as error:
        culprit = error.rank if isinstance(error, PeerError) else None
        return Outcome(type(error).__name__, culprit, str(error), time.monotonic() - started)
    return Outcome("nothing", None, "", time.monotonic() - started)


# By what is different: the call that most ranks make, and that of the odd one.
DIFFERENCES: dict[str, tuple[Callable[[syncline.Fabric], object], Callable[[syncline.Fabric], object]]] = {
    "length": (
        lambda fabric: fabric.all_reduce(torch.ones(1000), collective="ring"),
        lambda fabric: fabric.all_reduce(torch.ones(1001), collective="ring"),
    ),
    "dtype": (
        lambda fabric: fabric.all_reduce(torch.ones(10), collective="ring"),
        lambda fabric: fabric.all_reduce(torch.ones(10, dtype=torch.int32), collective="ring"),
    ),
    "op": (
        lambda fabric: fabric.all_reduce(torch.ones(10), op="sum"),
        lambda fabric: fabric.all_reduce(torch.ones(10), op="max"),
    ),
    "algorithm": (
        lambda fabric: fabric.all_reduce(torch.ones(10), collective="tree"),
        lambda fabric: fabric.all_reduce(torch.ones(10), collective="tree:arity=3"),
    ),
    "kind": (
        lambda fabric: fabric.all_gather(torch.ones(10)),
        lambda fabric: fabric.barrier(),
    ),
    "root": (
        lambda fabric: fabric.broadcast(torch.ones(10), root=0),
        lambda fabric: fabric.broadcast(torch.ones(10), root=1),
    ),
}


def differ(fabric: syncline.Fabric, odd: int) -> dict[str, tuple[Outcome, Tensor]]:
    """Make each pair of different calls, and after each a common one."""
    outcomes = {}
    for name, calls in DIFFERENCES.items():
        outcome = outcome_of(partial(calls[fabric.rank == odd], fabric))
        outcomes[name] = outcome, fabric.all_reduce(torch.tensor([1.0 + fabric.rank]))
    return outcomes


def differ_at_the_end_of_a_long_name(fabric: syncline.Fabric) -> Outcome:
    """Two names that are alike for longer than any fixed number of bytes."""
    name = f"hierarchical:inner=tree:pieces={4 + fabric.rank % 2:0600}"
    return outcome_of(lambda: fabric.all_reduce(torch.ones(1000), collective=name))


def call_twice(fabric: syncline.Fabric, collective: str) -> list[Outcome]:
    """A collective and a barrier, in one of which every survivor notices; then one more call, which must fail at once.

    A rank may be done with a collective before a peer fails in it: that is why the barrier is there.
    """
    cut_finely(fabric)
    x = noise(fabric.rank, 400, torch.float32)

    def collective_and_barrier() -> None:
        fabric.all_reduce(x, collective=collective)
        fabric.barrier()

    return [outcome_of(collective_and_barrier), outcome_of(fabric.barrier)]


def strike_at_step(fabric: syncline.Fabric, step: int | None, strike: Callable[[], None]) -> None:
    """Let something happen to this rank when it posts that step of the next collective, or now."""
    if step is None:
        strike()
        return
    posted = iter(range(step + 1))

    def enter_round(number: int) -> None:
        if next(posted, None) == step:
            strike()

    fabric.enter_round = enter_round


def with_a_victim(
    fabric: syncline.Fabric, victim: int, step: int | None, strike: Callable[[], None], collective: str, folder: str
) -> list[Outcome]:
    """Rank `victim` is struck at a step of its first collective or before it; the others report."""
    fabric.barrier()
    if fabric.rank == victim:
        strike_at_step(fabric, step, strike)
    outcomes = call_twice(fabric, collective)
    if fabric.rank != victim:
        report_and_stay(fabric, folder)
    return outcomes


def without_one(fabric: syncline.Fabric, absent: int, collective: str, folder: str) -> list[Outcome]:
    """Rank `absent` returns before the others are done."""
    if fabric.rank == absent:
        return []
    outcomes = call_twice(fabric, collective)
    report_and_stay(fabric, folder)
    return outcomes


def report_and_stay(fabric: syncline.Fabric, folder: str) -> None:
    """Stay until all survivors have noticed, so that nobody notices only because this rank leaves too."""
    Path(folder, str(fabric.rank)).touch()
    wait_for_reports(folder, fabric.world - 1)


def wait_for_reports(folder: str, count: int) -> None:
    """Do nothing until so many ranks have reported, or for far too long."""
    until = time.monotonic() + 30.0
    while len(os.listdir(folder)) < count and time.monotonic() < until:
        time.sleep(0.01)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def with_a_slow_rank(fabric: syncline.Fabric, slow: int, seconds: float, cases: Iterable[Case]) -> list[Tensor]:
    """Rank `slow` is late before every collective and, where that can be arranged, in the middle of it."""
    results = []
    for case in cases:
        if fabric.rank == slow:
            time.sleep(seconds)
            strike_at_step(fabric, 1, partial(time.sleep, seconds))
        results.append(reduce_whole_numbers(fabric, case))
    return results


def with_a_stopped_rank(fabric: syncline.Fabric, victim: int, collective: str) -> None:
    """Rank `victim` is stopped for good, and nobody catches anything."""
    cut_finely(fabric)
    fabric.barrier()
    if fabric.rank == victim:
        be_stopped()
    fabric.all_reduce(noise(fabric.rank, 400, torch.float32), collective=collective)
    fabric.barrier()


def stop_for_good(fabric: syncline.Fabric, victims: Sequence[int], folder: str, meet: bool) -> int:
    """Some ranks are stopped; the others wait for them, or have their result without them, and say when."""
    fabric.barrier()
    if fabric.rank in victims:
        be_stopped()
    try:
        if meet:
            fabric.barrier()
    finally:
        Path(folder, str(fabric.rank)).write_text(str(time.monotonic()))
    return fabric.rank


def stop_for_a_while(fabric: syncline.Fabric, victims: Sequence[int], seconds: float) -> int:
    """Some ranks are stopped, and a helper of theirs lets them go on."""
    if fabric.rank in victims:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        be_stopped()
    return fabric.rank


def take_longer(fabric: syncline.Fabric, slow: int, seconds: float) -> int:
    """One rank ends long after the others."""
    if fabric.rank == slow:
        time.sleep(seconds)
    return fabric.rank


# Starting and ending


def rank_and_process(fabric: syncline.Fabric) -> tuple[int, int, int]:
    return fabric.rank, fabric.world, os.getpid()


def finds_current(fabric: syncline.Fabric) -> bool:
    return syncline.current() is fabric and resolve("auto") is fabric and resolve(fabric) is fabric


def joins_existing_group(fabric: syncline.Fabric, fabric_name: str) -> tuple[str, int, int, list[int]]:
    """`init` in a process that has a process group already."""
    mine = syncline.init(fabric=fabric_name)
    total = mine.all_reduce(torch.tensor([mine.rank + 1]))
    return mine.name, mine.rank, mine.world, total.tolist()


def reduces_in_a_part(fabric: syncline.Fabric, members: list[int]) -> list[int] | None:
    """All-reduce in a process group of some ranks."""
    group = dist.new_group(members)
    if fabric.rank not in members:
        return None
    part = TorchFabric(group)
    return [part.rank, part.world, *part.all_reduce(torch.tensor([fabric.rank]), collective="ring").tolist()]


def not_a_member(fabric: syncline.Fabric) -> str:
    """The message for a rank outside of the group it asks for."""
    group = dist.new_group([0])
    try:
        TorchFabric(group)
    except syncline.SynclineError as error:
        return str(error)
    return ""


def hosts_as_told(fabric: syncline.Fabric, names: list[str]) -> tuple[tuple[int, ...], ...]:
    """The hosts that a fabric finds when ranks pretend to be on some."""
    os.environ["SYNCLINE_HOST"] = names[fabric.rank]
    return TorchFabric().hosts


def number_of_threads(fabric: syncline.Fabric) -> int:
    return torch.get_num_threads()


class CannotTravel(Exception):
    """An exception that cannot be sent to another process."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.callback = lambda: None


def fail_on(fabric: syncline.Fabric, rank: int, error: type[Exception], argument: str, barrier: bool = True) -> int:
    """Rank `rank` fails; the others wait for it or do not."""
    if fabric.rank == rank:
        raise error(argument)
    if barrier:
        fabric.barrier()
    return fabric.rank


def ask_for_a_wrong_name(fabric: syncline.Fabric) -> None:
    fabric.all_reduce(torch.ones(1), collective="rign")


def fail_while_others_sleep(fabric: syncline.Fabric, rank: int, seconds: float) -> None:
    if fabric.rank == rank:
        raise ValueError("one of four")
    time.sleep(seconds)


def end_on(fabric: syncline.Fabric, rank: int, end: Callable[[], None]) -> int:
    """Rank `rank` ends without a word, the others wait for it."""
    if fabric.rank == rank:
        end()
    fabric.barrier()
    return fabric.rank


def returns_what_cannot_travel(fabric: syncline.Fabric) -> object:
    return lambda: fabric.rank


def says_its_process_and_waits(fabric: syncline.Fabric, folder: str, wait: Callable[[syncline.Fabric], None]) -> None:
    """Leave a file named after this process, then wait for what never comes."""
    Path(folder, str(os.getpid())).touch()
    wait(fabric)


def sleep(fabric: syncline.Fabric) -> None:
    time.sleep(60.0)


def wait_for_rank_0(fabric: syncline.Fabric) -> None:
    """All but rank 0 wait inside of the engine."""
    if fabric.rank == 0:
        time.sleep(60.0)
    fabric.barrier()


# Calls in flight


def engine_calls_at_once(fabric: syncline.Fabric, length: int) -> list[Tensor]:
    """Start more than can be in flight, the last ones on a tensor that is on its way, and one call behind them all."""
    tensors = [whole_numbers(fabric.rank, fabric.world, length, torch.float32) for _ in range(6)]
    handles = [fabric.all_reduce_async(tensor, collective="engine") for tensor in tensors]
    handles += [fabric.all_reduce_async(tensors[-1], op="max", collective="engine")]
    handles += [fabric.all_reduce_async(tensors[-1], op="mean", collective="engine")]
    tensors.append(fabric.all_reduce(whole_numbers(fabric.rank, fabric.world, 50, torch.float32), collective="engine"))
    assert all(handle.done() for handle in handles)
    for handle in reversed(handles):
        handle.wait()
    return tensors


def differs_in_the_middle(fabric: syncline.Fabric, odd: int) -> list[str]:
    """Of five engine calls in flight, one differs on one rank: what came of each."""
    lengths = [10_000, 10_000, 10_000 + (fabric.rank == odd), 10_000, 10_000]
    tensors = [torch.ones(length) for length in lengths]
    handles = [fabric.all_reduce_async(tensor, collective="engine") for tensor in tensors]
    kinds = [outcome_of(handle.wait).kind for handle in handles]
    sums = [float(tensor.sum() / tensor.numel()) for tensor in tensors]
    return [f"{kind} {total:g}" for kind, total in zip(kinds, sums, strict=True)]


def closes_in_flight(fabric: syncline.Fabric) -> list[str]:
    """Rank 0 leaves without waiting; what the calls of the others come to."""
    fabric.barrier()
    if fabric.rank == 0:
        handle = fabric.all_reduce_async(torch.ones(3_000_000), collective="engine")
        others = [fabric.all_reduce_async(torch.ones(3_000_000), collective="engine") for _ in range(5)]
        fabric.close(drain=False)
        return [outcome_of(each.wait).kind for each in (handle, *others)]
    handles = [fabric.all_reduce_async(torch.ones(3_000_000), collective="engine") for _ in range(6)]
    return [outcome_of(handle.wait).kind for handle in handles]


# Results that are not finite


def finite_as_told(
    fabric: syncline.Fabric, dtypes: Sequence[torch.dtype], length: int, shared: bool, collective: str = "auto"
) -> list[str]:
    """For each kind of bad element in each rank's slice, and without any: what the handle says, if it is wrong."""
    wrong = []
    for dtype, bad, part in product(dtypes, (0.0, nan, inf, -inf), range(fabric.world)):
        x = fabric.buffer(length, dtype) if shared else torch.zeros(length, dtype=dtype)
        x.fill_(1)
        if fabric.rank == part:
            x[(2 * part + 1) * length // (2 * fabric.world)] = bad
        handle = fabric.all_reduce_async(x, op="mean", collective=collective)
        handle.wait()
        if handle.finite() is not bool(torch.isfinite(x).all()):
            wrong.append(f"{dtype} {bad} in slice {part}: {handle.finite()}")
    return wrong
