"""Ranks that differ, or that are killed, stopped, slow or absent in a call. Light: ranks import it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import syncline
from support.outcomes import Outcome, outcome_of
from support.reducing import Case, cut_finely, reduce_whole_numbers
from support.references import noise

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

    fabric.transport.enter_round = enter_round


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


def strike_before(owner: type, name: str, strike: Callable[[], None], call: int = 1) -> None:
    """Let something happen to this process before a call of a method, whichever thread makes it."""
    method, calls = getattr(owner, name), itertools.count(1)

    def striking(*arguments: object, **named: object) -> object:
        if next(calls) == call:
            strike()
        return method(*arguments, **named)

    setattr(owner, name, striking)


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
