"""Ranks that differ, leave, die or stall: an error that names them on every survivor, in time, and never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

import syncline
from support.catalogue import ENGINES, FABRICS, PROCESS_FABRICS, one_now_others_slow
from support.outcomes import Outcome
from support.patience import within
from support.reducing import Case, reduce_noise, reduce_whole_numbers
from support.references import closed_form, same_bits
from support.striking import (
    DIFFERENCES,
    be_killed,
    call_twice,
    differ,
    differ_at_the_end_of_a_long_name,
    wait_for_reports,
    with_a_slow_rank,
    with_a_stopped_rank,
    with_a_victim,
    without_one,
)
from syncline import Deadlines
from syncline.collectives.program import compile_program
from syncline.collectives.registry import ALGORITHMS, schedule_of
from syncline.errors import FabricError, PeerLost, PeerStalled, RankFailed
from syncline.fabric.health import culprit
from syncline.fabric.threads import Dies, ScriptedDeath, SendsLate, Stalls, Threads
from syncline.launch.failures import ProcessStopped

WORLD, VICTIM = 4, 2
SOON_S = 2.0  # within which a fault is noticed, from when it could be
PATIENT = Deadlines(20.0)  # of calls that end long before, unless something is wrong
MESSAGE_FABRICS = ("torch",)  # whose ranks can be struck in the middle of a collective


def with_engine(fabric: str, collectives: tuple[str, ...]) -> tuple[str, ...]:
    return (*collectives, "engine") if fabric in ENGINES else collectives


def everywhere(fabrics: tuple[str, ...]) -> pytest.MarkDecorator:
    """Before a call all algorithms are alike, so there are two, what the fabric prefers, and its engine."""
    pairs = [(fabric, name) for fabric in fabrics for name in with_engine(fabric, ("ring", "tree", "auto"))]
    return pytest.mark.parametrize(("fabric", "collective"), pairs)


def struck(strike: Callable[[], None], step: int | None, collective: str, folder: Path) -> Callable:
    """What the ranks do when something befalls the victim."""
    return partial(with_a_victim, victim=VICTIM, step=step, strike=strike, collective=collective, folder=str(folder))


def survivors_of(outcomes: dict[int, list[Outcome]], victim: int = VICTIM) -> list[list[Outcome]]:
    """What the others report; all of them must."""
    assert set(outcomes) >= set(range(WORLD)) - {victim}
    return [outcome for rank, outcome in sorted(outcomes.items()) if rank != victim]


def assert_all_blame(outcomes: list[list[Outcome]], kind: type[FabricError], within_s: float) -> None:
    """Every survivor names the victim in time, and the next call repeats it at once."""
    for first, second in outcomes:
        assert (first.kind, first.culprit) == (kind.__name__, VICTIM), first
        assert f"rank {VICTIM} " in first.message
        assert first.seconds < within_s
        assert (second.kind, second.culprit) == (first.kind, first.culprit), second
        assert second.seconds < within(0.5)


# Ranks that differ


@cache
def differences(fabric: str) -> list[dict[str, tuple[Outcome, torch.Tensor]]]:
    """One life of three ranks, of which rank 1 is the odd one."""
    return syncline.run(partial(differ, odd=1), 3, fabric, PATIENT)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_differ_are_told_so_and_go_on(fabric: str, difference: str) -> None:
    for outcomes in differences(fabric):
        outcome, afterwards = outcomes[difference]
        assert outcome.kind == "Desync"
        assert afterwards.tolist() == [6.0]


SIDES = {
    "length": ("all_reduce(sum, float32[1000], ring)", "all_reduce(sum, float32[1001], ring)"),
    "dtype": ("float32[10]", "int32[10]"),
    "op": ("all_reduce(sum, ", "all_reduce(max, "),
    "algorithm": ("tree", "tree:arity=3"),
    "kind": ("all_gather(", "barrier("),
    "root": ("broadcast(", " 0", " 1"),
}


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("difference", SIDES)
def test_the_error_names_both_sides(fabric: str, difference: str) -> None:
    for outcomes in differences(fabric):
        message = outcomes[difference][0].message
        assert all(side in message for side in SIDES[difference]), message
        assert "ranks 0, 2" in message
        assert "rank 1 " in message


def test_the_error_names_everyone_when_all_differ() -> None:
    def all_differ(fabric: syncline.Fabric) -> str:
        with pytest.raises(FabricError) as caught:
            fabric.all_reduce(torch.ones(1 + fabric.rank), collective="ring")
        return str(caught.value)

    (message,) = set(syncline.run(all_differ, 3, "threads"))
    assert all(f"rank {rank} called all_reduce(sum, float32[{1 + rank}], ring)" in message for rank in range(3))


@pytest.mark.parametrize("fabric", FABRICS)
def test_names_too_long_to_be_compared_are_refused(fabric: str) -> None:
    outcomes = syncline.run(differ_at_the_end_of_a_long_name, 2, fabric, PATIENT)
    assert {outcome.kind for outcome in outcomes} <= {"Desync", "ConfigError"}
    assert all(outcome.seconds < within(1.0) for outcome in outcomes)


# Ranks that leave


@pytest.mark.timeout(120)
@everywhere(FABRICS)
def test_a_rank_that_has_left_is_lost(fabric: str, collective: str, tmp_path: Path) -> None:
    work = partial(without_one, absent=VICTIM, collective=collective, folder=str(tmp_path))
    outcomes = dict(enumerate(syncline.run(work, WORLD, fabric, PATIENT)))
    assert_all_blame(survivors_of(outcomes), PeerLost, within_s=within(5.0))


# Ranks that die


def rounds_of(collective: str) -> list[int]:
    """The rounds in which the victim takes part: first, middle and last, for 400 numbers cut finely."""
    schedule = schedule_of(collective, WORLD)
    rounds = sorted({step.round for step in compile_program(schedule, VICTIM, 400, 64, 4)})
    return sorted({rounds[0], rounds[len(rounds) // 2], rounds[-1]})


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_a_thread_that_dies_in_any_round_is_lost(collective: str) -> None:
    for number in rounds_of(collective):
        setup = Threads(faults=[Dies(rank=VICTIM, round=number)], deadlines=PATIENT)
        with pytest.raises(RankFailed, match=f"rank {VICTIM} failed first") as caught:
            syncline.run(partial(call_twice, collective=collective), WORLD, setup)
        assert list(map(type, caught.value.failures.values())) == [ScriptedDeath]
        assert_all_blame(survivors_of(caught.value.results), PeerLost, within_s=within(5.0))


@pytest.mark.timeout(120)
@everywhere(PROCESS_FABRICS)
def test_a_process_that_is_killed_before_a_call_is_lost(fabric: str, collective: str, tmp_path: Path) -> None:
    work = struck(be_killed, None, collective, tmp_path)
    with pytest.raises(RankFailed, match="was ended by SIGKILL") as caught:
        syncline.run(work, WORLD, fabric, PATIENT)
    assert list(caught.value.failures) == [VICTIM]
    assert_all_blame(survivors_of(caught.value.results), PeerLost, within_s=within(SOON_S))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", MESSAGE_FABRICS)
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_a_process_that_is_killed_in_a_call_is_lost(fabric: str, collective: str, tmp_path: Path) -> None:
    work = struck(be_killed, 1, collective, tmp_path)
    with pytest.raises(RankFailed, match="was ended by SIGKILL") as caught:
        syncline.run(work, WORLD, fabric, PATIENT)
    assert list(caught.value.failures) == [VICTIM]
    assert_all_blame(survivors_of(caught.value.results), PeerLost, within_s=within(SOON_S))


# Ranks that stall


@pytest.mark.sampled(3)
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_a_thread_that_stalls_in_any_round_is_named(collective: str) -> None:
    for number in rounds_of(collective):
        setup = Threads(faults=[Stalls(rank=VICTIM, round=number)], deadlines=Deadlines(deadline_s := within(0.5)))
        outcomes = syncline.run(partial(call_twice, collective=collective), WORLD, setup)
        assert_all_blame(survivors_of(dict(enumerate(outcomes))), PeerStalled, deadline_s + within(SOON_S))


@pytest.mark.parametrize("victim", range(5))
def test_whoever_stalls_is_named_and_nobody_else(victim: int) -> None:
    setup = Threads(faults=[Stalls(rank=victim, round=1)], deadlines=Deadlines(within(0.5)))
    outcomes = syncline.run(partial(call_twice, collective="ring"), 5, setup)
    assert {outcome[0].culprit for rank, outcome in enumerate(outcomes) if rank != victim} == {victim}


@pytest.mark.sampled(3)
@pytest.mark.timeout(120)
@everywhere(PROCESS_FABRICS)
def test_a_process_that_stalls_before_a_call_is_named(fabric: str, collective: str, tmp_path: Path) -> None:
    stall = partial(wait_for_reports, str(tmp_path), WORLD - 1)
    work = struck(stall, None, collective, tmp_path)
    outcomes = dict(enumerate(syncline.run(work, WORLD, fabric, Deadlines(deadline_s := within(1.0)))))
    assert_all_blame(survivors_of(outcomes), PeerStalled, deadline_s + within(SOON_S))


@pytest.mark.sampled(3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", MESSAGE_FABRICS)
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_a_process_that_stalls_in_a_call_is_named(fabric: str, collective: str, tmp_path: Path) -> None:
    stall = partial(wait_for_reports, str(tmp_path), WORLD - 1)
    work = struck(stall, 1, collective, tmp_path)
    outcomes = dict(enumerate(syncline.run(work, WORLD, fabric, Deadlines(deadline_s := within(1.0)))))
    assert_all_blame(survivors_of(outcomes), PeerStalled, deadline_s + within(SOON_S))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS))
def test_a_process_that_is_stopped_is_named_and_removed(fabric: str) -> None:
    started, deadlines = time.monotonic(), Deadlines(within(1.0))
    with pytest.raises(RankFailed) as caught:
        syncline.run(partial(with_a_stopped_rank, victim=VICTIM, collective="ring"), WORLD, fabric, deadlines)
    assert time.monotonic() - started < within(20.0)
    found = {rank: (type(error), error.rank) for rank, error in caught.value.failures.items()}
    assert found.pop(VICTIM) == (ProcessStopped, VICTIM)
    assert found == dict.fromkeys([0, 1, 3], (PeerStalled, VICTIM))


# Ranks that are only slow


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_a_thread_that_is_late_changes_nothing(collective: str) -> None:
    case = Case(collective, 400, torch.float32, "sum")
    numbers = rounds_of(collective)
    late = [SendsLate(rank=VICTIM, round=number, seconds=0.1) for number in numbers]
    setup = Threads(faults=late, deadlines=PATIENT)
    for result in syncline.run(partial(reduce_whole_numbers, case=case), WORLD, setup):
        assert same_bits(result, closed_form("sum", WORLD, 400, torch.float32))


def test_a_thread_that_is_late_is_waited_for() -> None:
    setup = Threads(faults=[SendsLate(rank=0, round=0, seconds=0.3)], deadlines=PATIENT)
    started = time.monotonic()
    syncline.run(partial(reduce_noise, case=Case("ring", 400, torch.float32, "sum")), WORLD, setup)
    assert time.monotonic() - started >= 0.3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_a_process_that_is_late_changes_nothing(fabric: str) -> None:
    cases = [Case(collective, 400, torch.float32, "sum") for collective in with_engine(fabric, (*ALGORITHMS, "auto"))]
    work = partial(with_a_slow_rank, slow=VICTIM, seconds=0.15, cases=cases)
    for results in syncline.run(work, WORLD, fabric, PATIENT):
        assert all(same_bits(result, closed_form("sum", WORLD, 400, torch.float32)) for result in results)


def test_a_call_that_all_have_begun_ends_well_though_a_rank_ends_after_it() -> None:
    """Rank 2 is slow to take the message of rank 3; meanwhile rank 0 is done and ends, and rank 1 notices that."""
    passed = []

    def two_barriers(fabric: syncline.Fabric) -> None:
        take = fabric.transport._take
        if fabric.rank == 2:
            fabric.transport._take = lambda expected, message: (
                time.sleep(0.3 * (expected.source == 3)),
                take(expected, message),
            )
        fabric.barrier()
        passed.append(fabric.rank)
        if fabric.rank == 0:
            raise ValueError("this rank ends")
        fabric.barrier()

    with pytest.raises(RankFailed, match="this rank ends") as caught:
        syncline.run(two_barriers, 4, "threads", Deadlines(10.0))
    assert sorted(passed) == [0, 1, 2, 3]
    assert {type(error) for rank, error in caught.value.failures.items() if rank} == {PeerLost}


# Scripts and blame


def test_a_fault_strikes_only_in_its_call() -> None:
    def three_calls(fabric: syncline.Fabric) -> int:
        for _ in range(3):
            fabric.all_reduce(torch.ones(1), collective="direct")
        return fabric.transport.call_count

    setup = Threads(faults=[Dies(rank=0, round=0, call=3)])
    with pytest.raises(RankFailed, match="dies by script in round 0") as caught:
        syncline.run(three_calls, 2, setup)
    assert list(caught.value.failures) == [0, 1]
    assert syncline.run(three_calls, 2, Threads(faults=[Dies(rank=0, round=0, call=4)])) == [3, 3]


@pytest.mark.parametrize(
    ("waits_for", "guilty"),
    [({}, 1), ({1: 2}, 2), ({1: 0, 0: 3, 3: 2}, 2), ({2: 0, 0: 1}, 1)],
)
def test_the_guilty_one_is_at_the_end_of_the_chain(waits_for: dict[int, int], guilty: int) -> None:
    assert culprit(1, waits_for.get) == guilty


def test_a_chain_that_bites_its_tail_ends() -> None:
    assert culprit(0, {0: 1, 1: 2, 2: 0}.get) in {0, 1, 2}
