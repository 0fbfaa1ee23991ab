"""Every schedule is proven for every world and costs what its closed form says; the prover refuses wrong ones."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, count, islice, pairwise
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.catalogue import COLLECTIVES, FLAT_NAMES, WORLDS, placed_schedules, placements, with_rounds
from syncline.collectives import all_gather, all_to_all, broadcast, reduce_scatter
from syncline.collectives.double_tree import DoubleTree, two_trees
from syncline.collectives.hierarchical import Hierarchical
from syncline.collectives.program import verify_matching
from syncline.collectives.registry import ALGORITHMS, algorithm, cheapest, schedule_of
from syncline.collectives.schedule import Cost, Hosts, Schedule, Transfer, hosts_of_sizes, runs
from syncline.collectives.tree import Tree
from syncline.collectives.trees import depths, heap
from syncline.collectives.verify import verify
from syncline.errors import ConfigError, ScheduleError

SIZES = [(1, 4), (4, 1), (3, 2, 1), (2, 2), (4, 4, 4), (7, 8, 9), (1, 1, 1), (5,)]
DEALT = [((0, 2), (1, 3)), ((3, 0), (4,), (2, 1)), ((0, 5), (1, 4), (2, 3))]


def powers_of_two(world: int) -> bool:
    return world & (world - 1) == 0


# All-reduce


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_contribution_arrives_exactly_once(name: str) -> None:
    for world in WORLDS:
        verify(schedule_of(name, world))


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize("arity", [1, 2, 3, 4, 8])
def test_trees_of_every_arity_and_pipeline(arity: int, pieces: int) -> None:
    tree = Tree(arity=arity, pieces=pieces)
    for world in range(1, 34):
        schedule = tree.schedule(world)
        verify(schedule)
        assert schedule.cost == tree.closed_form(world)


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_double_trees_of_every_pipeline(pieces: int) -> None:
    double = DoubleTree(pieces=pieces)
    for world in WORLDS:
        schedule = double.schedule(world)
        verify(schedule)
        assert schedule.cost == double.closed_form(world)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_a_rank_is_a_parent_in_one_of_the_two_trees_at_most(world: int) -> None:
    first, second = ({parent for parent in tree if parent >= 0} for tree in two_trees(world))
    assert len(first & second) <= world % 2
    assert max(max(depths(tree)) for tree in two_trees(world)) == ceil(log2(world))


@pytest.mark.parametrize("outer", FLAT_NAMES)
@pytest.mark.parametrize("inner", FLAT_NAMES)
def test_hierarchies_of_any_two_algorithms_on_hosts_of_any_size(inner: str, outer: str) -> None:
    for hosts in [*map(hosts_of_sizes, SIZES), *DEALT]:
        verify(Hierarchical(inner=inner, outer=outer).schedule(sum(map(len, hosts)), hosts))


@pytest.mark.parametrize("world", [*range(1, 14), 16, 24, 33])
def test_the_default_hierarchy_in_every_placement(world: int) -> None:
    for hosts in placements(world):
        verify(schedule_of("hierarchical", world, hosts))


@pytest.mark.parametrize("inner", ["tree:arity=3,pieces=2", "double-tree:pieces=3", "tree:4"])
def test_hierarchies_of_algorithms_with_settings(inner: str) -> None:
    for sizes in SIZES:
        verify(Hierarchical(inner=inner, outer=inner).schedule(sum(sizes), hosts_of_sizes(sizes)))


@pytest.mark.parametrize(("local", "hosts"), [(8, 16), (16, 4), (10, 10), (2, 24)])
def test_hierarchies_of_many_equal_hosts(local: int, hosts: int) -> None:
    verify(schedule_of("hierarchical", local * hosts, hosts_of_sizes([local] * hosts)))


def test_the_sizes_setting_places_ranks_as_hosts_would() -> None:
    written = Hierarchical(sizes="3+2").schedule(5)
    assert written.rounds == Hierarchical().schedule(5, hosts_of_sizes([3, 2])).rounds


@pytest.mark.parametrize("sizes", ["2+2", "2+x", "2+3+0", "-1+6", "+"])
def test_sizes_that_do_not_hold_the_world_are_refused(sizes: str) -> None:
    with pytest.raises(ConfigError, match=r"sizes|hosts"):
        Hierarchical(sizes=sizes).schedule(5)


@pytest.mark.parametrize("hosts", [((0, 1), (1, 2)), ((0,), (2,)), ((0, 1, 2), ())])
def test_hosts_that_do_not_hold_every_rank_once_are_refused(hosts: Hosts) -> None:
    with pytest.raises(ConfigError, match="once each"):
        Hierarchical().schedule(3, hosts)


def test_a_hierarchy_of_hierarchies_is_refused() -> None:
    with pytest.raises(ConfigError, match="flat"):
        Hierarchical(inner="hierarchical:inner=ring")


def test_data_crosses_hosts_in_the_outer_rounds_only() -> None:
    hosts = hosts_of_sizes([4, 4, 4])
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    schedule = schedule_of("hierarchical", 12, hosts)
    crossing = [0] * 12
    for _, transfer in schedule.transfers():
        if host_of[transfer.src] != host_of[transfer.dst]:
            crossing[transfer.src] += transfer.hi - transfer.lo
    outer = Fraction(2 * (3 - 1), 3)
    assert {Fraction(sent, schedule.chunks) for sent in crossing} == {outer / 4}


# The other goals


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter(world: int) -> None:
    schedule = reduce_scatter.reduce_scatter(world)
    verify(schedule)
    assert schedule.cost == Cost(ceil(log2(world)), Fraction(world - 1, world)) == reduce_scatter.closed_form(world)


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather(world: int) -> None:
    schedule = all_gather.all_gather(world)
    verify(schedule)
    assert schedule.cost == Cost(ceil(log2(world)), Fraction(world - 1, world)) == all_gather.closed_form(world)


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_from_any_root(world: int) -> None:
    for root in sorted({0, world // 2, world - 1}):
        schedule = broadcast.broadcast(world, root)
        verify(schedule)
        assert schedule.cost == broadcast.closed_form(world)


HEAVY = [pytest.param(world, marks=pytest.mark.slow) for world in WORLDS if world > 64]


@pytest.mark.parametrize("world", [*(world for world in WORLDS if world <= 64), *HEAVY])
def test_all_to_all(world: int) -> None:
    schedule = all_to_all.all_to_all(world)
    verify(schedule)
    assert schedule.cost == Cost(world - 1, Fraction(world - 1, world**2)) == all_to_all.closed_form(world)


# Costs


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_counted_is_the_closed_form(name: str) -> None:
    for world in WORLDS:
        assert schedule_of(name, world).cost == algorithm(name).closed_form(world)


@pytest.mark.parametrize("world", WORLDS)
def test_bandwidth_optimal_algorithms_send_no_more_than_they_must(world: int) -> None:
    least = Fraction(2 * (world - 1), world)
    assert schedule_of("ring", world).cost == Cost(2 * (world - 1), least)
    assert schedule_of("direct", world).cost == Cost(2 * (world > 1), least)
    assert (schedule_of("halving-doubling", world).cost.sent == least) == powers_of_two(world)


@pytest.mark.parametrize("name", ["ring", "direct"])
def test_in_bandwidth_optimal_algorithms_every_rank_sends_the_same(name: str) -> None:
    for world in WORLDS[1:]:
        schedule = schedule_of(name, world)
        assert set(chunks_sent(schedule)) == {2 * (world - 1)}


def chunks_sent(schedule: Schedule) -> list[int]:
    """How many chunks each rank sends."""
    sent = [0] * schedule.world
    for _, transfer in schedule.transfers():
        sent[transfer.src] += transfer.hi - transfer.lo
    return sent


@pytest.mark.parametrize("world", WORLDS)
def test_rounds_of_logarithmic_algorithms(world: int) -> None:
    folding = 0 if powers_of_two(world) else 2
    assert schedule_of("halving-doubling", world).cost.rounds == 2 * (world.bit_length() - 1) + folding
    if world > 1:
        assert schedule_of("double-tree", world).cost.rounds == 2 * ceil(log2(world)) + 4 - 1
        assert schedule_of("double-tree", world).cost.sent <= 2


@pytest.mark.parametrize("inner", ["ring", "direct", "halving-doubling", "tree", "double-tree"])
@pytest.mark.parametrize("outer", FLAT_NAMES)
def test_the_cost_of_hierarchies_of_equal_hosts_adds_up(inner: str, outer: str) -> None:
    for local, machines in [(1, 3), (2, 2), (3, 4), (4, 3), (8, 2)]:
        hosts = hosts_of_sizes([local] * machines)
        both = Hierarchical(inner=inner, outer=outer)
        formula = both.closed_form(local * machines, hosts)
        assert formula in (None, both.schedule(local * machines, hosts).cost)
        assert (formula is not None) or inner not in ("ring", "direct")


def test_unequal_hosts_have_no_closed_form() -> None:
    assert Hierarchical().closed_form(5, hosts_of_sizes([2, 3])) is None


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 13, 64])
@pytest.mark.parametrize("nbytes", [0, 1, 1 << 10, 1 << 20, 1 << 30])
def test_auto_is_never_dearer_than_a_flat_candidate(world: int, nbytes: int) -> None:
    def seconds(name: str) -> float:
        cost = schedule_of(name, world).cost
        return cost.rounds * 1e-4 + float(cost.sent) * nbytes / 1e9

    chosen = cheapest(nbytes, world, (), 1e-4, 1e9)
    assert seconds(chosen) == min(map(seconds, ("ring", "halving-doubling", "direct")))


@pytest.mark.parametrize("world", [3, 4, 5, 8, 13])
@pytest.mark.parametrize("nbytes", [100 << 10, 25 << 20])
def test_between_hosts_no_rank_hears_several_at_once_if_much_is_said(world: int, nbytes: int) -> None:
    hosts = hosts_of_sizes([1] * world)
    schedule = schedule_of(cheapest(nbytes, world, hosts, 150e-6, 1e9), world, hosts)
    for transfers in schedule.rounds:
        assert len({transfer.dst for transfer in transfers}) == len(transfers)
    short = schedule_of(cheapest(1 << 10, world, hosts, 150e-6, 1e9), world, hosts)
    assert len(short.rounds) == 2


# Sends and receives match


@pytest.mark.parametrize("name", COLLECTIVES)
def test_both_ends_cut_alike(name: str) -> None:
    for world in (1, 2, 3, 5, 8, 13):
        for schedule in placed_schedules(name, world):
            for numel, segment, grain in [(0, 4, 1), (1, 4, 1), (world + 1, 1, 1), (509, 7, 3), (100, 1000, 64)]:
                verify_matching(schedule, numel, segment, grain)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_both_ends_cut_alike_for_the_other_goals(world: int) -> None:
    others = [all_gather.all_gather(world), reduce_scatter.reduce_scatter(world), all_to_all.all_to_all(world)]
    for schedule in [*others, broadcast.broadcast(world, world - 1)]:
        for numel in (0, 1, world - 1, world**2, 1009):
            verify_matching(schedule, numel, 3, 1)


# The prover refuses what is wrong. These mutations are wrong whatever the schedule: every schedule here is tight.


def every_schedule(world: int) -> list[Schedule]:
    """All goals, over `world` ranks."""
    reducing = [schedule for name in ALGORITHMS for schedule in placed_schedules(name, world)]
    others = [all_gather.all_gather(world), reduce_scatter.reduce_scatter(world), all_to_all.all_to_all(world)]
    return [*reducing, *others, *(broadcast.broadcast(world, root) for root in range(world))]


def replaced(schedule: Schedule, number: int, index: int, transfers: list[Transfer]) -> Schedule:
    """The schedule with one transfer of one round replaced by others."""
    rounds = [list(some) for some in schedule.rounds]
    rounds[number][index : index + 1] = transfers
    return with_rounds(schedule, rounds)


def without(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    return []


def twice(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    return [transfer, transfer]


def with_the_other_action(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    return [transfer._replace(op="copy" if transfer.op == "add" else "add")]


def with_an_unknown_action(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    return [transfer._replace(op="average")]


def to_itself(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    return [transfer._replace(dst=transfer.src)]


def from_nowhere(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    return [transfer._replace(src=-1)]


def to_nowhere(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    return [transfer._replace(dst=schedule.world)]


def of_nothing(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    return [transfer._replace(hi=transfer.lo)]


def past_the_end(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    width = transfer.hi - transfer.lo
    return [transfer._replace(lo=schedule.chunks, hi=schedule.chunks + width)]


def of_the_next_chunks(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    return [transfer._replace(lo=transfer.lo + 1, hi=transfer.hi + 1)]


def of_one_chunk_too_few(transfer: Transfer, schedule: Schedule) -> list[Transfer]:
    return [transfer._replace(lo=transfer.lo + 1)]


MUTATIONS = [
    without,
    twice,
    with_the_other_action,
    with_an_unknown_action,
    to_itself,
    from_nowhere,
    to_nowhere,
    of_nothing,
    past_the_end,
    of_the_next_chunks,
    of_one_chunk_too_few,
]


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_any_one_wrong_transfer_is_refused(mutation, world: int) -> None:
    for schedule in every_schedule(world):
        for number, transfers in enumerate(schedule.rounds):
            for index, transfer in enumerate(transfers):
                wrong = replaced(schedule, number, index, mutation(transfer, schedule))
                with pytest.raises(ScheduleError):
                    verify(wrong)


@given(st.data())
def test_a_wrong_transfer_in_a_larger_world_is_refused(data: st.DataObject) -> None:
    world = data.draw(st.integers(6, 20), "world")
    schedule = schedule_of(data.draw(st.sampled_from(sorted(ALGORITHMS)), "algorithm"), world)
    number = data.draw(st.integers(0, len(schedule.rounds) - 1), "round")
    index = data.draw(st.integers(0, len(schedule.rounds[number]) - 1), "transfer")
    mutation = data.draw(st.sampled_from(MUTATIONS), "mutation")
    wrong = replaced(schedule, number, index, mutation(schedule.rounds[number][index], schedule))
    with pytest.raises(ScheduleError, match=rf"over {world} ranks"):
        verify(wrong)


@pytest.mark.parametrize("name", ["ring", "halving-doubling", "direct"])
@pytest.mark.parametrize("world", [3, 4, 5, 8])
def test_two_dependent_rounds_at_once_are_refused(name: str, world: int) -> None:
    schedule = schedule_of(name, world)
    for number in range(len(schedule.rounds) - 1):
        rounds = [list(transfers) for transfers in schedule.rounds]
        rounds[number : number + 2] = [rounds[number] + rounds[number + 1]]
        with pytest.raises(ScheduleError, match=r"same round|overwrites"):
            verify(with_rounds(schedule, rounds))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world", [3, 4, 5, 8])
def test_rounds_in_the_wrong_order_are_refused(name: str, world: int) -> None:
    schedule = schedule_of(name, world)
    with pytest.raises(ScheduleError):
        verify(with_rounds(schedule, [list(transfers) for transfers in reversed(schedule.rounds)]))


def test_reading_and_changing_a_chunk_in_one_round_is_refused() -> None:
    exchange = (Transfer(0, 1, 0, 1, "add"), Transfer(1, 0, 0, 1, "add"))
    with pytest.raises(ScheduleError, match="read in the same round"):
        verify(Schedule("exchange", 2, 1, (exchange,)))


def test_two_copies_into_one_chunk_in_one_round_are_refused() -> None:
    gather = (Transfer(0, 1, 0, 1, "add"),), (Transfer(1, 2, 0, 1, "add"),)
    spread = (Transfer(2, 0, 0, 1, "copy"), Transfer(2, 1, 0, 1, "copy"))
    verify(Schedule("chain", 3, 1, (*gather, spread)))
    with pytest.raises(ScheduleError, match="overwrites"):
        verify(Schedule("chain", 3, 1, (*gather, (*spread, Transfer(2, 0, 0, 1, "copy")))))


def test_two_ranks_that_complete_one_chunk_are_refused() -> None:
    # Every rank ends with every contribution once, but 1 and 3 add in different orders: not the same bits.
    rounds = (
        (Transfer(0, 1, 0, 1, "add"), Transfer(2, 3, 0, 1, "add")),
        (Transfer(3, 2, 0, 1, "copy"),),
        (Transfer(1, 3, 0, 1, "add"),),
        (Transfer(2, 1, 0, 1, "add"),),
        (Transfer(1, 0, 0, 1, "copy"), Transfer(3, 2, 0, 1, "copy")),
    )
    with pytest.raises(ScheduleError, match="rank 3 completes too"):
        verify(Schedule("two owners", 4, 1, rounds))


def test_sending_what_one_does_not_have_is_refused() -> None:
    with pytest.raises(ScheduleError, match="holds nothing"):
        verify(Schedule("early", 3, 3, ((Transfer(0, 1, 2, 3, "copy"),),), goal="all_gather"))


def test_adding_to_what_was_never_written_is_refused() -> None:
    # Memory that holds nothing may hold anything: a result arrives there by copying only.
    with pytest.raises(ScheduleError, match="nothing"):
        verify(Schedule("adds", 2, 1, ((Transfer(0, 1, 0, 1, "add"),),), goal="broadcast"))


def test_messages_that_do_not_match_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.collectives import program

    whole = program.compile_program
    monkeypatch.setattr(program, "compile_program", lambda schedule, rank, *cut: whole(schedule, rank, *cut)[rank:])
    with pytest.raises(ScheduleError, match="is not what"):
        verify_matching(schedule_of("ring", 3), 1000, 100, 1)


# Small parts


@given(st.sets(st.integers(0, 40)))
def test_runs_are_the_same_chunks_in_as_few_ranges_as_possible(chunks: set[int]) -> None:
    ranges = runs(sorted(chunks, reverse=True))
    assert [chunk for lo, hi in ranges for chunk in range(lo, hi)] == sorted(chunks)
    assert all(end < start for (_, end), (start, _) in pairwise(ranges))


@pytest.mark.parametrize("arity", [1, 2, 3, 8])
def test_a_heap_has_every_rank_at_the_least_depth(arity: int) -> None:
    levels = chain.from_iterable([depth] * arity**depth for depth in count())
    filled = list(islice(levels, 40))
    for world in range(1, 40):
        assert depths(heap(world, arity)) == filled[:world]


@pytest.mark.parametrize("make", [lambda: Tree(arity=0), lambda: Tree(pieces=0), lambda: DoubleTree(pieces=-1)])
def test_settings_that_are_too_small_are_refused(make) -> None:
    with pytest.raises(ConfigError, match=r"is less than 1; try \w+=1"):
        make()
