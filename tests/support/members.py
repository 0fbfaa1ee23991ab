"""What ranks do in tests of subgroups. Light, because every process of a rank imports it: no pytest."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from support.families import at_rest, left_since, outcome_and_error
from support.faulty import remove
from support.striking import report_and_stay
from syncline.collectives.schedule import Hosts
from syncline.errors import ConfigError
from syncline.fabric import process_groups
from syncline.fabric.base import Fabric
from syncline.fabric.torch import torch_fabric

Ranks = tuple[int, ...]
How = tuple[str, int | None, float]  # a call ended: the error, the rank that it blames, after how many seconds


def lists_of(world: int) -> list[Ranks]:
    """Every set of ranks in one order or the other, and one of them a second time."""
    sets = [ranks for size in range(1, world + 1) for ranks in combinations(range(world), size)]
    return [*(ranks[:: (-1) ** position] for position, ranks in enumerate(sets)), tuple(range(world))]


def mine_of(fabric: Fabric, lists: Iterable[Ranks]) -> list[tuple[Ranks, Fabric]]:
    """The subgroups that this rank is a member of."""
    return [(ranks, fabric.subgroup(ranks)) for ranks in lists if fabric.rank in ranks]


def pairs_with(fabric: Fabric, server: int) -> dict[int, Fabric]:
    """A subgroup of two for every worker: what a parameter server has. Each worker has but one."""
    workers = [rank for rank in range(fabric.world) if rank != server]
    if fabric.rank != server:
        workers = [fabric.rank]
    return {worker: fabric.subgroup([server, worker]) for worker in workers}


def total(fabric: Fabric, value: float) -> float:
    return fabric.all_reduce(torch.full((1000,), value)).unique().item()


class Answer(NamedTuple):
    """Of one subgroup, to one of its members."""

    ranks: Ranks
    rank: int
    world: int
    total: float
    gathered: list[float]
    from_last: float


def answer(fabric: Fabric, ranks: Ranks, mine: float) -> Answer:
    gathered = fabric.all_gather(torch.tensor([mine])).flatten().tolist()
    from_last = fabric.broadcast(torch.tensor([mine]), root=fabric.world - 1).item()
    return Answer(ranks, fabric.rank, fabric.world, total(fabric, mine), gathered, from_last)


def use_all(fabric: Fabric) -> list[Answer]:
    """What each subgroup of this rank answers; all of them exist before the first is used."""
    return [answer(group, ranks, 2.0**fabric.rank) for ranks, group in mine_of(fabric, lists_of(fabric.world))]


def use_the_same_ranks_again(fabric: Fabric, count: int) -> list[float]:
    """Several fabrics of the same ranks, each closed before the next is made, then several at once, last one first."""
    ranks = [fabric.world - 1, 0]
    if fabric.rank not in ranks:
        return []
    totals = []
    for turn in range(count):
        with fabric.subgroup(ranks) as group:
            totals.append(total(group, float(turn)))
    together = [fabric.subgroup(ranks) for _ in range(count)]
    return totals + [total(group, 10.0 * turn) for turn, group in reversed([*enumerate(together)])]


def use_subgroups_of_a_subgroup(fabric: Fabric) -> list[float]:
    """Ranks 3, 1, 4 as a group, of which the last two are one again; then a sibling of that.

    Rank 0 has made another subgroup before, with 4 alone, so ranks have made different numbers of groups.
    """
    totals = [total(group, 1.0) for _, group in mine_of(fabric, [(0, 4)])]
    for _, three in mine_of(fabric, [(3, 1, 4)]):
        totals.append(total(three, 10.0 * fabric.rank))
        for _, two in mine_of(three, [(1, 2)]):
            sibling = two.subgroup()
            totals += [total(two, 100.0 * fabric.rank), total(sibling, 1000.0 * fabric.rank)]
    return totals


def use_subgroups_of_a_process_group(fabric: Fabric) -> list[float]:
    """The parent is a group over ranks 1, 2 and 4 of the world."""
    group = dist.new_group([1, 2, 4])
    if fabric.rank not in (1, 2, 4):
        return []
    with torch_fabric(group) as part:
        return [total(pair, 10.0**fabric.rank) for _, pair in mine_of(part, [(2, 0), (1, 2), (2, 0)])]


def hosts_among_members(fabric: Fabric, names: list[str]) -> list[Hosts]:
    """The hosts of each subgroup, and of a sibling of it, when ranks pretend to be on some."""
    if fabric.name == "torch":  # ranks that are threads would all be told the same, and so would later tests
        os.environ["SYNCLINE_HOST"] = names[fabric.rank]
        fabric = torch_fabric(dist.new_group(), fabric.deadlines)
    return [
        group.hosts for _, parent in mine_of(fabric, [(4, 0, 1, 2), (3, 1)]) for group in (parent, parent.subgroup())
    ]


# At once


def serve_from_threads(fabric: Fabric, turns: int) -> dict[int, list[float]]:
    """A thread for each worker, and one for all ranks together; the parent is used meanwhile."""
    groups = pairs_with(fabric, 0) | {0: fabric.subgroup(range(fabric.world)), -1: fabric}
    found: dict[int, list[float]] = {number: [] for number in groups}

    def work(number: int) -> None:
        for turn in range(turns):
            found[number].append(total(groups[number], 10.0 * turn + fabric.rank))

    threads = [threading.Thread(target=work, args=(number,)) for number in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def begin_in_opposite_orders(fabric: Fabric) -> tuple[float, float]:
    """One rank makes and uses a subgroup while its call on the parent is under way, for which the other is late."""
    mine, shared = torch.tensor([1.0 + fabric.rank]), torch.tensor([10.0])
    if fabric.rank == 0:
        handle = fabric.all_reduce_async(mine)
        fabric.subgroup([0, 1]).all_reduce(shared)
    else:
        fabric.subgroup([0, 1]).all_reduce(shared)
        handle = fabric.all_reduce_async(mine)
    handle.wait()
    return mine.item(), shared.item()


def post_both_ways(fabric: Fabric, length: int) -> list[tuple[float, float]]:
    """Every pair exchanges two messages each way, all of them in flight together."""
    pairs = mine_of(fabric, [(right, left) for left, right in combinations(range(fabric.world), 2)])
    taken = []
    under_way = []
    for _, pair in pairs:
        arriving = [torch.full((length,), -1.0) for _ in range(2)]
        leaving = [torch.full((length,), 10.0 * fabric.rank + turn) for turn in range(2)]
        peer = 1 - pair.rank
        under_way.append(
            pair.transport.post([(tensor, peer) for tensor in leaving], [(tensor, peer) for tensor in arriving])
        )
        taken.append(arriving)
    for pending in under_way:
        pending.wait()
    return [(first.unique().item(), second.unique().item()) for first, second in taken]


# Failures


class Seen(NamedTuple):
    """By one rank, after another was struck."""

    parent: How
    with_victim: list[How]
    without: list[float]
    made_after: list[float]


def go_on_without(fabric: Fabric, victim: int, strike: Callable[[], None], folder: str) -> Seen:
    """One rank is struck between calls; the others use the parent, then all of their subgroups, then make more."""
    groups = mine_of(fabric, [ranks for ranks in lists_of(fabric.world) if len(ranks) > 1])
    fabric.barrier()
    if fabric.rank == victim:
        strike()
    parent = outcome_and_error(fabric.barrier)
    with_victim = [outcome_and_error(group.barrier) for ranks, group in groups if victim in ranks]
    without = [total(group, 2.0**fabric.rank) for ranks, group in groups if victim not in ranks]
    others = tuple(rank for rank in range(fabric.world) if rank != victim)
    made_after = [total(group, 2.0**fabric.rank) for _, group in mine_of(fabric, [others])]
    if fabric.rank != victim:
        report_and_stay(fabric, folder)
    return Seen(parent, with_victim, without, made_after)


def stop_and_go_on(fabric: Fabric, victim: int, strike: Callable[[], None], folder: str) -> Seen:
    """The same with a rank that is stopped, which is removed at the end: a stopped process would be waited for."""
    pids = fabric.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
    seen = go_on_without(fabric, victim, strike, folder)
    if fabric.rank != victim:
        remove(pids[victim])
    return seen


def go() -> None:
    raise ValueError("this rank goes")


def use_the_last_two(fabric: Fabric) -> float:
    """Twice, and the parent never."""
    if fabric.rank < 2:
        return 0.0
    pair = fabric.subgroup([3, 2])
    return total(pair, 1.0) + total(pair, 1.0)


def wait_for_one_who_never_comes(fabric: Fabric) -> tuple[How, float]:
    """Rank 0 makes and uses a subgroup that rank 1 knows nothing of; then both use the parent."""

    def make_and_use() -> None:
        fabric.subgroup([0, 1]).barrier()

    if fabric.rank:
        time.sleep(1.5)  # so that it does not wait in the parent for as long as the other one does elsewhere
    outcome = outcome_and_error(make_and_use) if fabric.rank == 0 else ("nothing", None, 0.0)
    return outcome, total(fabric, 1.0)


# Endings


def close_alone(fabric: Fabric) -> tuple[How, float, float]:
    """One of two subgroups is closed: the other and the parent are still there."""
    closed, other = fabric.subgroup([1, 0]), fabric.subgroup([1, 0])
    closed.barrier()
    closed.close()
    closed.close()
    return outcome_and_error(closed.barrier), total(other, 1.0), total(fabric, 2.0)


def close_with_the_parent(fabric: Fabric, drain: bool) -> list[How]:
    """How calls of a subgroup and its own subgroup end, and how making another ends, after the first one was closed."""
    child = fabric.subgroup([1, 0])
    grandchild = child.subgroup([0, 1])
    grandchild.barrier()
    fabric.barrier()
    fabric.close(drain)
    calls = [child.barrier, grandchild.barrier, partial(fabric.subgroup, [0, 1]), partial(child.subgroup, [0, 1])]
    return [outcome_and_error(call) for call in calls]


def close_at_once(fabric: Fabric, count: int) -> None:
    """Make subgroups and close each before the others may have connected to it."""
    for _ in range(count):
        fabric.subgroup(range(fabric.world)).close()


def has_waited_for_the_slow(fabric: Fabric, connected: Path) -> bool:
    """Whether a rank that has connected to all others is held until the one that is slow at it has said so."""
    if fabric.rank == 1:
        connect = process_groups.new_group

        def slowly(*given: Any) -> dist.ProcessGroup:
            group = connect(*given)
            time.sleep(0.5)
            connected.touch()
            return group

        process_groups.new_group = slowly
    fabric.subgroup(range(fabric.world))
    return connected.exists()


def make_and_close(fabric: Fabric, count: int) -> tuple[int, int, int]:
    """How many more descriptors and threads there are after so many have come and gone, and how many are remembered."""
    use_and_close(fabric, 1)
    before = at_rest()
    use_and_close(fabric, count)
    return *left_since(before), len(fabric.children)


def use_and_close(fabric: Fabric, count: int) -> None:
    groups = [group for turn in range(count) for _, group in mine_of(fabric, [(0, 1, 2), (2, 0)])]
    for group in groups:
        group.all_reduce_async(group.buffer(1000)).wait()
    for group in groups:
        group.close()
    fabric.barrier()


# Refusals


def refusals(fabric: Fabric) -> list[str]:
    """What is said of lists that are impossible; afterwards possible ones still work."""
    said = []
    for ranks in ([], [0, 1, 0], [0, fabric.world], [0, -1], [1 - fabric.rank]):
        try:
            fabric.subgroup(ranks)
        except ConfigError as error:
            said.append(str(error))
    assert total(fabric.subgroup([1, 0]), 1.0) == 2.0
    return said


def close_from_threads(fabric: Fabric, times: int) -> list[str]:
    """Subgroups that several threads close at once; what went wrong."""
    wrong: list[str] = []

    def close(pair: Fabric) -> None:
        try:
            pair.close(drain=False)
        except BaseException as error:
            wrong.append(repr(error))

    for _ in range(times):
        pair = fabric.subgroup([0, 1])
        fabric.barrier()  # what is closed while another rank connects to it fails there
        threads = [threading.Thread(target=close, args=(pair,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fabric.barrier()
    return wrong
