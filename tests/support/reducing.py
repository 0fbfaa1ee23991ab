"""Ranks that reduce. Light: ranks import it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import inf, nan
from typing import NamedTuple

import torch
from torch import Tensor

import syncline
from support.outcomes import outcome_of
from support.references import noise, whole_numbers
from support.telling import tell, wait_for
from syncline.fabric.handle import Handle

# Collectives


def cut_finely(fabric: syncline.Fabric) -> None:
    """Let short tensors travel in many chunks and segments."""
    fabric.transport.segment_bytes, fabric.transport.grain_bytes = 256, 16


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


def add_ones(fabric: syncline.Fabric) -> float:
    """In memory of the fabric."""
    bucket = fabric.buffer(1_000_000)
    bucket.fill_(1.0)
    return float(fabric.all_reduce(bucket).sum())


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


def closes_in_flight(fabric: syncline.Fabric, folder: str) -> list[str]:
    """Rank 0 leaves without waiting; what the calls of the others come to.

    Rank 2 makes the last one when rank 0 has left, however long that takes, so it is never among those that ended.
    """

    def begin(calls: int) -> list[Handle]:
        return [fabric.all_reduce_async(torch.ones(3_000_000), collective="engine") for _ in range(calls)]

    fabric.barrier()
    handles = begin(5)
    if fabric.rank == 2:
        wait_for(folder, "closed")
    handles += begin(1)
    if fabric.rank == 0:
        fabric.close(drain=False)
        tell(folder, "closed")
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
