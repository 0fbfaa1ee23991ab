"""Fabrics with siblings, and how they are closed. Light: ranks import it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from support.patience import within
from support.striking import be_killed, wait_for_reports
from syncline.errors import JoinFailed, PeerError
from syncline.fabric.base import Fabric

# Siblings


def outcome_and_error(call: Callable[[], object]) -> tuple[str, int | None, float]:
    """The type of the error that a call raised, the rank it blames, and how long that took."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        culprit = error.rank if isinstance(error, PeerError) else None
        return type(error).__name__, culprit, time.monotonic() - started
    return "nothing", None, time.monotonic() - started


def start_in_opposite_orders(fabric: Fabric, turns: int) -> list[tuple[list[float], list[float]]]:
    """Even ranks start on the fabric first, odd ones on its sibling; nobody waits before both are started."""
    sibling = fabric.subgroup()
    order = [fabric, sibling] if fabric.rank % 2 == 0 else [sibling, fabric]
    sums = []
    for turn in range(turns):
        tensors = {fabric: torch.full((1000,), 1.0 + fabric.rank), sibling: torch.full((10,), 100.0 * turn)}
        handles = []
        for one in order:
            handles.append(one.all_reduce_async(tensors[one]))
            time.sleep(0.02)
        for handle in handles:
            handle.wait()
        sums.append((tensors[fabric].unique().tolist(), tensors[sibling].unique().tolist()))
    return sums


def family_of(fabric: Fabric) -> list[Fabric]:
    """A child, a grandchild, and a second child."""
    child = fabric.subgroup()
    return [child, child.subgroup(), fabric.subgroup()]


def use_a_family(fabric: Fabric) -> list[tuple[int, int, float]]:
    """Each member adds something else, all of them at the same time, in an order of its own on every rank."""
    family = [fabric, *family_of(fabric)]
    tensors = [torch.tensor([10.0**position * (1 + fabric.rank)]) for position in range(len(family))]
    starts = [(position + fabric.rank) % len(family) for position in range(len(family))]
    for handle in [family[position].all_reduce_async(tensors[position]) for position in starts]:
        handle.wait()
    return [(member.rank, member.world, tensor.item()) for member, tensor in zip(family, tensors, strict=True)]


def close_the_parent(fabric: Fabric, drain: bool) -> list[tuple[str, int | None, float]]:
    """How calls of a family end after its head was closed, which is done twice."""
    family = family_of(fabric)
    for member in family:
        member.barrier()
    fabric.barrier()
    fabric.close(drain)
    fabric.close(drain)
    calls = [member.barrier for member in [fabric, *family]]
    calls += [partial(start_and_wait, member) for member in [fabric, *family]]
    return [outcome_and_error(call) for call in calls]


def start_and_wait(fabric: Fabric) -> None:
    fabric.all_reduce_async(torch.ones(3)).wait()


def close_a_sibling_only(fabric: Fabric) -> tuple[tuple[str, int | None, float], float]:
    """The fabric that it was made from is still there."""
    sibling = fabric.subgroup()
    sibling.barrier()
    sibling.close()
    return outcome_and_error(sibling.barrier), fabric.all_reduce(torch.tensor([1.0 + fabric.rank])).item()


def make_and_close_siblings(fabric: Fabric, count: int) -> tuple[int, int]:
    """How many more descriptors and threads there are after so many siblings have come and gone."""
    use_siblings(fabric, 1)
    before = at_rest()
    use_siblings(fabric, count)
    return left_since(before)


def use_siblings(fabric: Fabric, count: int) -> None:
    siblings = [fabric.subgroup() for _ in range(count)]
    for sibling in siblings:
        sibling.all_reduce_async(sibling.buffer(1000)).wait()
    for sibling in siblings:
        sibling.close()
    fabric.barrier()


def lose_one_who_has_joined(fabric: Fabric, victim: int) -> tuple[str, int | None, float]:
    """A rank is killed while a sibling is made, when the others have a connection to it, which fails."""
    from syncline.fabric import torch as torch_module

    def connection_fails(*_: object) -> None:
        raise JoinFailed("not all have come: Gloo connectFullMesh failed with Connection closed by peer [127.0.0.1]")

    if fabric.rank == victim:
        be_killed()
    torch_module.make_group = connection_fails
    return outcome_and_error(fabric.subgroup)


def resources() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def at_rest() -> tuple[int, int]:
    """The fewest in a while: what was closed just now goes a little later."""
    seen = [resources()]
    until = time.monotonic() + within(0.3)
    while time.monotonic() < until:
        time.sleep(0.02)
        seen.append(resources())
    descriptors, threads = map(min, zip(*seen, strict=True))
    return descriptors, threads


def left_since(before: tuple[int, int]) -> tuple[int, int]:
    """How many more there are; those that go late are given some time."""
    until = time.monotonic() + within(5.0)
    while True:
        descriptors, threads = (max(now - then, 0) for now, then in zip(resources(), before, strict=True))
        if not descriptors + threads or time.monotonic() > until:
            return descriptors, threads
        time.sleep(0.02)


# Ending what is under way


@dataclass(frozen=True)
class Ended:
    """How long it took to close, and how calls ended: the error, the rank that it blames, and after how long."""

    closing_s: float
    calls: list[tuple[str, int | None, float]]


def close_while_under_way(fabric: Fabric, closes: int, start: tuple[int, ...], folder: str) -> Ended:
    """Some ranks start two calls that cannot end, because others do not; then one rank gives up."""
    fabric.barrier()
    handles = [fabric.all_reduce_async(torch.ones(10)) for _ in range(2)] if fabric.rank in start else []
    closing_s = 0.0
    if fabric.rank == closes:
        time.sleep(0.3)
        _, _, closing_s = outcome_and_error(partial(fabric.close, drain=False))
    elif not handles:
        wait_for_reports(folder, len({closes, *start}))
        return Ended(0.0, [outcome_and_error(fabric.barrier)])
    found = [outcome_and_error(handle.wait) for handle in handles]
    Path(folder, str(fabric.rank)).touch()
    wait_for_reports(folder, len({closes, *start}))
    return Ended(closing_s, found)


def close_with_patience(fabric: Fabric, late: int) -> tuple[float, bool]:
    """Close right after a call was started, for which another rank is late."""
    sibling = fabric.subgroup()
    tensor = torch.full((1000,), 1.0 + fabric.rank)
    if fabric.rank == late:
        time.sleep(0.3)
    handle = sibling.all_reduce_async(tensor)
    sibling.close()
    done = handle.done()
    handle.wait()
    return tensor.mean().item(), done
