"""What the contract tests go through. A new algorithm or fabric is found in its table and needs nothing here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from syncline.collectives.flat import FLAT
from syncline.collectives.registry import ALGORITHMS, schedule_of
from syncline.collectives.schedule import Hosts, Schedule, hosts_of_sizes
from syncline.launch.run import SETUPS

WORLDS = (*range(1, 34), 48, 64, 100, 128)
FABRICS = tuple(SETUPS)
PROCESS_FABRICS = tuple(name for name in SETUPS if name != "threads")
ENGINES = ("torch",)  # fabrics with an all-reduce of their own

SETTINGS = (
    "tree:arity=1",
    "tree:arity=3,pieces=1",
    "tree:arity=8,pieces=7",
    "double-tree:pieces=1",
    "double-tree:pieces=7",
    "hierarchical:inner=ring,outer=halving-doubling",
    "hierarchical:inner=tree,outer=double-tree",
)
COLLECTIVES = (*ALGORITHMS, *SETTINGS)
FLAT_NAMES = tuple(FLAT)


def one_now_others_slow(choices: Sequence) -> list:
    """All choices for a test that takes seconds, of which `make test` tries the first only."""
    return [choices[0], *(pytest.param(choice, marks=pytest.mark.slow) for choice in choices[1:])]


def uneven_hosts(world: int) -> list[int]:
    """Sizes of hosts that hold `world` ranks: threes and what is left."""
    return [3] * (world // 3) + [world % 3] * bool(world % 3)


def placements(world: int) -> Iterator[Hosts]:
    """Ways to place ranks on hosts: together, apart, in pairs, unevenly, and dealt out like cards."""
    yield hosts_of_sizes([world])
    yield hosts_of_sizes([1] * world)
    if world > 2:
        yield hosts_of_sizes([2] * (world // 2) + [1] * (world % 2))
        yield hosts_of_sizes(uneven_hosts(world))
        yield hosts_of_sizes([1, world - 1])
        yield tuple(tuple(range(first, world, 2)) for first in range(2))


def placed_schedules(name: str, world: int) -> list[Schedule]:
    """The schedules of an algorithm in every placement, without those that are the same."""
    schedules = [schedule_of(name, world, hosts) for hosts in placements(world)]
    return list({schedule.rounds: schedule for schedule in schedules}.values())


def with_rounds(schedule: Schedule, rounds: list[list]) -> Schedule:
    """The same schedule with other rounds; empty ones go."""
    kept = tuple(tuple(transfers) for transfers in rounds if transfers)
    return Schedule(schedule.algorithm, schedule.world, schedule.chunks, kept, schedule.goal, schedule.root)
