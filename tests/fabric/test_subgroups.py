"""Subgroups: right answers, used at once, and a rank that fails breaks only those that it is a member of."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

import syncline
from support import members
from support.catalogue import FABRICS, PROCESS_FABRICS, one_now_others_slow
from support.members import Answer, Ranks, Seen, lists_of
from support.patience import within
from support.striking import be_killed, be_stopped, wait_for_reports
from syncline import Deadlines
from syncline.core.group import Group
from syncline.errors import RankFailed
from syncline.fabric.threads import Dies, Threads

PATIENT = Deadlines(20.0)
DEADLINE_S, SOON_S = 1.5, 2.5
everywhere = pytest.mark.parametrize("fabric", FABRICS)
on_processes = pytest.mark.parametrize("fabric", PROCESS_FABRICS)


# Answers


def expected(ranks: Ranks, rank: int) -> Answer:
    """To the member that is `rank` of the parent, when each gives two to the power of its rank there."""
    given = [2.0**member for member in ranks]
    return Answer(ranks, ranks.index(rank), len(ranks), sum(given), given, given[-1])


@everywhere
@pytest.mark.parametrize("world", one_now_others_slow([3, 2, 4, 5]))
def test_every_subgroup_answers_for_its_members_in_the_order_given(fabric: str, world: int) -> None:
    for rank, answers in enumerate(syncline.run(members.use_all, world, fabric, PATIENT)):
        assert answers == [expected(ranks, rank) for ranks in lists_of(world) if rank in ranks]


@everywhere
def test_the_same_ranks_again_give_another_fabric(fabric: str) -> None:
    results = syncline.run(partial(members.use_the_same_ranks_again, count=3), 3, fabric, PATIENT)
    assert results == [[0.0, 2.0, 4.0, 40.0, 20.0, 0.0], [], [0.0, 2.0, 4.0, 40.0, 20.0, 0.0]]


@everywhere
def test_subgroups_have_subgroups(fabric: str) -> None:
    results = syncline.run(members.use_subgroups_of_a_subgroup, 5, fabric, PATIENT)
    assert results == [[2.0], [80.0, 500.0, 5000.0], [], [80.0], [2.0, 80.0, 500.0, 5000.0]]


def test_a_process_group_of_some_ranks_has_subgroups() -> None:
    results = syncline.run(members.use_subgroups_of_a_process_group, 5, "torch", PATIENT)
    first, second, fourth = 10.0, 100.0, 10_000.0
    assert results == [
        [],
        [fourth + first] * 2,
        [second + fourth],
        [],
        [fourth + first, second + fourth, fourth + first],
    ]


# Hosts


@pytest.mark.parametrize("fabric", [Threads(host_sizes=[2, 3]), "torch"], ids=["threads", "torch"])
def test_hosts_are_those_of_the_parent_counted_anew(fabric: str | Threads) -> None:
    work = partial(members.hosts_among_members, names=["a", "a", "b", "b", "b"])
    four, two = [((0, 3), (1, 2))] * 2, [((0,), (1,))] * 2
    assert syncline.run(work, 5, fabric, PATIENT) == [four, four + two, four, two, four]


def test_hosts_without_members_are_left_out() -> None:
    assert Group.on_hosts([0, 1, 2, 0, 2]).among([4, 3, 2]).hosts == ((0, 2), (1,))


# At once


@everywhere
@pytest.mark.parametrize("world", one_now_others_slow([4, 2, 3, 5]))
def test_subgroups_that_overlap_work_at_once(fabric: str, world: int) -> None:
    turns = 5
    results = syncline.run(partial(members.serve_from_threads, turns=turns), world, fabric, PATIENT)
    for rank, found in enumerate(results):
        everyone = [10.0 * turn * world + world * (world - 1) / 2 for turn in range(turns)]
        assert found.pop(0) == found.pop(-1) == everyone
        workers = [rank] if rank else range(1, world)
        assert found == {worker: [20.0 * turn + worker for turn in range(turns)] for worker in workers}


@everywhere
def test_making_and_using_one_waits_for_no_call_of_the_parent(fabric: str) -> None:
    assert syncline.run(members.begin_in_opposite_orders, 2, fabric, Deadlines(5.0, join=5.0)) == [(3.0, 20.0)] * 2


@everywhere
@pytest.mark.parametrize("length", one_now_others_slow([1000, 1, 300_007]))
def test_messages_go_both_ways(fabric: str, length: int) -> None:
    for rank, taken in enumerate(syncline.run(partial(members.post_both_ways, length=length), 4, fabric, PATIENT)):
        assert sorted(taken) == [(10.0 * peer, 10.0 * peer + 1) for peer in range(4) if peer != rank]


@on_processes
def test_one_that_several_threads_close_is_closed_once(fabric: str) -> None:
    """And nothing else is."""
    assert syncline.run(partial(members.close_from_threads, times=20), 2, fabric, PATIENT) == [[], []]


# Failures


def assert_only_its_own(seen: dict[int, Seen], world: int, victim: int, kind: str, within_s: float) -> None:
    """The parent and the subgroups with the victim are broken and blame it as they count; all others go on."""
    assert sorted(seen) == [rank for rank in range(world) if rank != victim]
    for rank, (parent, with_victim, without, made_after) in seen.items():
        mine = [ranks for ranks in lists_of(world) if rank in ranks and len(ranks) > 1]
        assert parent[:2] == (kind, victim)
        assert [how[:2] for how in with_victim] == [(kind, ranks.index(victim)) for ranks in mine if victim in ranks]
        assert max(seconds for _, _, seconds in [parent, *with_victim]) < within_s
        assert without == [sum(2.0**member for member in ranks) for ranks in mine if victim not in ranks]
        assert made_after == [2.0**world - 1 - 2.0**victim]


@on_processes
@pytest.mark.parametrize("victim", one_now_others_slow([1, 0, 3]))
def test_a_killed_rank_breaks_only_its_own_subgroups(fabric: str, victim: int, tmp_path: Path) -> None:
    work = partial(members.go_on_without, victim=victim, strike=be_killed, folder=str(tmp_path))
    with pytest.raises(RankFailed, match="was ended by SIGKILL") as caught:
        syncline.run(work, 4, fabric, PATIENT)
    assert list(caught.value.failures) == [victim]
    assert_only_its_own(caught.value.results, 4, victim, "PeerLost", within(SOON_S))


@on_processes
@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_stopped_rank_breaks_only_its_own_subgroups(fabric: str, victim: int, tmp_path: Path) -> None:
    work = partial(members.stop_and_go_on, victim=victim, strike=be_stopped, folder=str(tmp_path))
    with pytest.raises(RankFailed, match="was ended by SIGKILL") as caught:
        syncline.run(work, 3, fabric, Deadlines(DEADLINE_S, join=5.0))
    assert_only_its_own(caught.value.results, 3, victim, "PeerStalled", DEADLINE_S + within(SOON_S))


@pytest.mark.parametrize("victim", [1, 0, 3])
def test_a_thread_that_ends_breaks_only_its_own_subgroups(victim: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="goes") as caught:
        syncline.run(
            partial(members.go_on_without, victim=victim, strike=members.go, folder=str(tmp_path)),
            4,
            "threads",
            PATIENT,
        )
    assert list(caught.value.failures) == [victim]
    assert_only_its_own(caught.value.results, 4, victim, "PeerLost", within(SOON_S))


def test_a_thread_that_stalls_breaks_only_its_own_subgroups(tmp_path: Path) -> None:
    strike = partial(wait_for_reports, str(tmp_path), 2)
    work = partial(members.go_on_without, victim=1, strike=strike, folder=str(tmp_path))
    results = syncline.run(work, 3, "threads", Deadlines(deadline_s := within(0.3)))
    assert_only_its_own({rank: results[rank] for rank in (0, 2)}, 3, 1, "PeerStalled", deadline_s + within(SOON_S))


def test_scripted_faults_befall_the_same_rank_in_a_subgroup() -> None:
    with pytest.raises(RankFailed) as caught:
        syncline.run(members.use_the_last_two, 4, Threads(faults=[Dies(rank=2, call=2), Dies(rank=0, call=1)]))
    assert list(caught.value.failures) == [2, 3]
    assert caught.value.failures[3].rank == 1


@pytest.mark.sampled(1)
@everywhere
def test_one_who_never_comes_is_waited_for_no_longer_than_the_deadline(fabric: str) -> None:
    deadlines = Deadlines(5.0, join=1.0) if fabric != "threads" else Deadlines(1.0)
    started = time.monotonic()
    (outcome, total), (_, other) = syncline.run(members.wait_for_one_who_never_comes, 2, fabric, deadlines)
    assert outcome[0] == ("PeerStalled" if fabric == "threads" else "JoinFailed")
    assert outcome[2] < 1.0 + within(SOON_S)
    assert total == other == 2.0
    assert time.monotonic() - started < within(20.0)


# Endings


@everywhere
def test_closing_one_leaves_the_others_and_the_parent(fabric: str) -> None:
    for (kind, _, _), of_other, of_parent in syncline.run(members.close_alone, 2, fabric, PATIENT):
        assert (kind, of_other, of_parent) == ("FabricClosed", 2.0, 4.0)


@everywhere
@pytest.mark.parametrize("drain", one_now_others_slow([True, False]))
def test_closing_the_parent_closes_them(fabric: str, drain: bool) -> None:
    for outcomes in syncline.run(partial(members.close_with_the_parent, drain=drain), 2, fabric, PATIENT):
        assert [kind for kind, _, _ in outcomes] == ["FabricClosed"] * 4
        assert max(seconds for _, _, seconds in outcomes) < within(1.0)


@on_processes
def test_ten_that_were_closed_leave_nothing_behind(fabric: str) -> None:
    assert syncline.run(partial(members.make_and_close, count=10), 3, fabric, PATIENT) == [(0, 0, 0)] * 3


@everywhere
@pytest.mark.parametrize("world", [2, 3])
def test_one_that_is_closed_at_once_is_no_loss_to_whoever_still_connects(fabric: str, world: int) -> None:
    syncline.run(partial(members.close_at_once, count=60), world, fabric, PATIENT)


def test_nobody_has_one_over_gloo_before_all_are_connected(tmp_path: Path) -> None:
    work = partial(members.has_waited_for_the_slow, connected=tmp_path / "connected")
    assert syncline.run(work, 3, "torch", PATIENT) == [True] * 3


# Refusals


@everywhere
def test_impossible_lists_are_refused_and_nothing_else_changes(fabric: str) -> None:
    for rank, said in enumerate(syncline.run(members.refusals, 2, fabric, PATIENT)):
        assert said == [
            f"rank {rank} is not in ranks=[], and only members make a subgroup; ask first: if fabric.rank in ranks",
            "ranks=[0, 1, 0] has a rank twice; use [0, 1]",
            "2 is not a rank of this world; ranks are 0..1",
            "-1 is not a rank of this world; ranks are 0..1",
            f"rank {rank} is not in ranks=[{1 - rank}], and only members make a subgroup; "
            "ask first: if fabric.rank in ranks",
        ]
