"""Gradients are as stale as they may be, and what is done about it."""

from __future__ import annotations

from functools import partial
from math import pi, sin

import pytest

import syncline
from support.on_a_line import (
    Turns,
    in_turn,
    read_and_hurry,
)


def threshold(staleness: int) -> float:
    """Of the rate of x' = x - rate * x, computed from an x that is so many updates old."""
    return 2 * sin(pi / (2 * (2 * staleness + 1)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_pushes_in_strict_turn_are_as_stale_as_there_are_other_workers(world: int) -> None:
    rounds, found = 400 // world, {}
    for part in (0.98, 1.02):
        rate = part * threshold(world - 1)
        work = partial(in_turn, turns=Turns(world), mode="async:share=false", rate=rate, rounds=rounds)
        by_rank = syncline.run(work, ranks=world, fabric="threads")
        x = [1.0] * world
        for _ in range(world * rounds):
            x.append(x[-1] - rate * x[-world])
        for rank, (path, staleness) in enumerate(by_rank):
            assert path == pytest.approx(x[world + rank :: world], rel=1e-6, abs=1e-9)
            first = {} if rank == world - 1 else {rank: 1}  # nobody had pushed before the first turn of rank 0
            assert staleness == {**first, world - 1: rounds - len(first)}
        found[part] = max(abs(path[-1]) for path, _ in by_rank)
    assert found[0.98] < 0.6
    assert found[1.02] > 1.8


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_no_worker_reads_further_ahead_of_the_slowest_than_the_bound_and_the_bound_is_reached(ahead: int) -> None:
    work = partial(read_and_hurry, mode=f"bounded:ahead={ahead}", steps=14, slow=2, seconds=0.02)
    reads, *_ = syncline.run(work, ranks=3, fabric="threads")
    assert len(reads) == 3 * (1 + 14 + 1)
    assert max(read.clock - read.slowest for read in reads) == ahead


def test_without_a_bound_workers_go_further() -> None:
    work = partial(read_and_hurry, mode="async", steps=14, slow=2, seconds=0.02)
    reads, *_ = syncline.run(work, ranks=3, fabric="threads")
    assert max(read.clock - read.slowest for read in reads) > 4


def test_damping_divides_by_one_plus_the_staleness() -> None:
    world, rate, rounds = 3, 0.25, 20
    work = partial(in_turn, turns=Turns(world), mode="async:share=false,damping=true", rate=rate, rounds=rounds)
    by_rank = syncline.run(work, ranks=world, fabric="threads")
    x = [1.0] * world
    for number in range(world * rounds):
        x.append(x[-1] - rate / (1 + min(number, world - 1)) * x[-world])
    for rank, (path, _) in enumerate(by_rank):
        assert path == pytest.approx(x[world + rank :: world], rel=1e-12)


def test_compensation_adds_the_first_order_change_and_leaves_the_gradients_of_the_worker_alone() -> None:
    world, rate, rounds, much = 2, 0.25, 20, 0.5
    mode = f"async:share=false,compensation={much}"
    by_rank = syncline.run(
        partial(in_turn, turns=Turns(world), mode=mode, rate=rate, rounds=rounds), ranks=world, fabric="threads"
    )
    x = [1.0] * world
    for _ in range(world * rounds):
        gradient = x[-world]
        x.append(x[-1] - rate * (gradient + much * gradient**2 * (x[-1] - x[-world])))
    for rank, (path, _) in enumerate(by_rank):
        assert path == pytest.approx(x[world + rank :: world], rel=1e-12)
