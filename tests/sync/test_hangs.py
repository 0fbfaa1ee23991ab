"""Ranks that hang, stop or die while they train: who, and in which bucket."""

from __future__ import annotations

from functools import cache, partial
from itertools import chain, product
from pathlib import Path

import pytest

import syncline
from support import faulty, guarded
from support.catalogue import PROCESS_FABRICS, one_now_others_slow
from support.failing import be_surprised_and_leave
from support.faulty import Strikes
from support.guarded import ONE_EACH, Net, Trained, filled, snapshot, train
from support.patience import within
from support.replicas import SOON_S, VICTIM, WORLD, same
from syncline import Deadlines
from syncline.errors import LateGradient, PeerLost, RankFailed
from syncline.fabric.health import NO_PROGRESS
from syncline.guards.hangs import explain

# Ranks that hang


def assert_report(rank: Trained, kind: str, *parts: str) -> None:
    """A survivor names the victim, and its report has all its parts."""
    assert (rank.error, rank.culprit) == (kind, VICTIM), rank.message
    for part in (f"rank {VICTIM} never produced bucket", "likely: ", *parts):
        assert part in rank.message, rank.message


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_a_rank_that_never_comes_to_its_backward_pass_is_reported(fabric: str, tmp_path: Path) -> None:
    work = partial(faulty.train_with_an_absent_rank, absent=VICTIM, step=3, folder=str(tmp_path))
    ranks = syncline.run(work, WORLD, fabric, Deadlines(deadline_s := within(2.0)))
    for rank in (ranks[0], ranks[2]):
        assert_report(
            rank,
            "PeerStalled",
            "never produced bucket 0 of step 3 (third.",
            "the last it produced is bucket 5 of step 2 (first.",
            "it never began this backward pass",
        )
        assert 0.9 * deadline_s < rank.seconds < deadline_s + within(SOON_S)
        assert same(rank.at_the_end, rank.parameters[2])


@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS[::-1]))
def test_a_rank_that_never_comes_to_its_first_backward_pass_is_reported(fabric: str, tmp_path: Path) -> None:
    """There are no buckets yet: what is reported is how they are planned."""
    work = partial(faulty.train_with_an_absent_rank, absent=VICTIM, step=1, folder=str(tmp_path))
    ranks = syncline.run(work, WORLD, fabric, Deadlines(within(1.5)))
    for rank in (ranks[0], ranks[2]):
        assert (rank.error, rank.culprit) == ("PeerStalled", VICTIM)
        assert same(rank.at_the_end, rank.parameters[0])
        assert_report(
            rank, "PeerStalled", "of step 1 (third.", "rank 1 has produced nothing yet", "it never began this"
        )


def survivors_of(fault: Strikes, fabric: str, folder: Path, deadline_s: float) -> dict[int, Trained]:
    """What the survivors of a fault have to say."""
    work = partial(faulty.train_with_a_victim, fault=fault, steps=5, folder=str(folder))
    with pytest.raises(RankFailed) as caught:
        syncline.run(work, WORLD, fabric, Deadlines(deadline_s))
    assert list(caught.value.failures) == [fault.victim]
    assert set(caught.value.results) == set(range(WORLD)) - {fault.victim}
    return caught.value.results


SENT_THIRD = ("never produced bucket 2 of step 3 (second.", "the last it produced is bucket 1 of step 3 (third.")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_a_rank_that_is_stopped_in_its_backward_pass_is_reported(fabric: str, tmp_path: Path) -> None:
    fault = Strikes(VICTIM, 3, "between buckets", faulty.stopped_later)
    for rank in survivors_of(fault, fabric, tmp_path, deadline_s := within(2.0)).values():
        assert_report(rank, "PeerStalled", *SENT_THIRD, "it is stuck or stopped in its backward pass before second.")
        assert 0.9 * deadline_s < rank.seconds < deadline_s + within(SOON_S)
        assert same(rank.at_the_end, rank.parameters[2])


@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS))
def test_a_rank_that_died_in_its_backward_pass_is_reported(fabric: str, tmp_path: Path) -> None:
    fault = Strikes(VICTIM, 3, "between buckets", faulty.killed_later)
    for rank in survivors_of(fault, fabric, tmp_path, deadline_s=20.0).values():
        assert_report(rank, "PeerLost", *SENT_THIRD, "its process died")
        assert rank.seconds < guarded.NOTE_S + within(SOON_S)


@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS))
def test_a_report_never_says_that_a_rank_produced_nothing_when_it_did(fabric: str, tmp_path: Path) -> None:
    """The rank dies soon after its first steps, when a slow board may not have heard of them."""
    fault = Strikes(VICTIM, 3, "between buckets", faulty.killed)
    for rank in survivors_of(fault, fabric, tmp_path, deadline_s=20.0).values():
        assert (rank.error, rank.culprit) == ("PeerLost", VICTIM)
        assert "of step 3" in rank.message
        assert "its process died" in rank.message
        assert "has produced nothing yet" not in rank.message


@pytest.mark.parametrize("mode", ["sync", "delayed"])
@pytest.mark.parametrize("fabric", ["threads", *one_now_others_slow(PROCESS_FABRICS)])
def test_a_rank_that_left_after_a_late_gradient_is_reported(fabric: str, mode: str) -> None:
    """What it sent for the others, with zeros, it did not produce."""
    with pytest.raises(RankFailed) as caught:
        syncline.run(partial(be_surprised_and_leave, mode=mode), WORLD, fabric, Deadlines(20.0))
    assert isinstance(caught.value.failures[VICTIM], LateGradient)
    assert set(caught.value.results) == {0, 2}
    for report in caught.value.results.values():
        # If all that it sent has arrived everywhere before it is gone, it is missed in the next step.
        assert report.startswith(
            (
                f"rank {VICTIM} sent bucket 5 of step 3 (middle.weight) off, but did not stay",
                f"rank {VICTIM} never produced bucket 0 of step 4 (last.bias); the last it produced is bucket 5",
            )
        )
        assert "likely: an exception ended its" in report


def test_a_report_does_not_contradict_itself() -> None:
    """A rank that has sent a bucket and is gone before that has arrived did produce it."""
    buckets = [["third.weight"], ["second.weight"], ["first.weight"]]
    report = str(explain(PeerLost(VICTIM, "it is gone"), 2, 1, buckets, (2, 3, 3, 1)))
    assert report.startswith(f"rank {VICTIM} sent bucket 1 of step 2 (second.weight) off, but did not stay")
    assert "never produced" not in report
    assert "the last it produced" not in report
    for note in ((2, 1, 1, 1), (1, 3, 3, 0), (2, 3, 1, 2)):
        report = str(explain(PeerLost(VICTIM, "it is gone"), 2, 1, buckets, note))
        assert report.startswith(f"rank {VICTIM} never produced bucket 1 of step 2 (second.weight); the last it")


def test_what_a_rank_is_known_to_have_ended_counts_more_than_an_older_note() -> None:
    """A board that is slow, or does not answer, has not heard of steps whose status has come from that rank."""
    buckets = [["third.weight"], ["second.weight"], ["first.weight"]]
    for note in (NO_PROGRESS, (1, 3, 3, 0), (2, 1, 1, 1), (2, 3, 3, 0)):
        report = str(explain(PeerLost(VICTIM, "it is gone"), 3, 0, buckets, note, ended=2))
        assert "the last it produced is bucket 2 of step 2 (first.weight)" in report, (note, report)
    newer = str(explain(PeerLost(VICTIM, "it is gone"), 3, 1, buckets, (3, 1, 1, 1), ended=2))
    assert "the last it produced is bucket 0 of step 3 (third.weight)" in newer
    failed = str(explain(PeerLost(VICTIM, "it is gone"), 3, 0, buckets, (2, 3, 1, 2), ended=2))
    assert "an exception ended its backward pass of step 2" in failed
    nothing = str(explain(PeerLost(VICTIM, "it is gone"), 1, 0, buckets, NO_PROGRESS))
    assert f"rank {VICTIM} has produced nothing yet, as far as is known" in nothing


# Ranks that are killed


@cache
def undisturbed(fabric: str) -> Trained:
    """What becomes of the parameters when nobody is killed."""
    return syncline.run(partial(train, steps=5, **ONE_EACH), WORLD, fabric, Deadlines(20.0))[0]


def kills() -> list:
    """Where and when, on which fabric; of the combinations that are alike one is tried at once."""
    now = {
        ("shm", "forward", 3),
        ("shm", "between buckets", 3),
        ("shm", "all sent", 3),
        ("shm", "some buckets are made", 1),
        ("torch", "start of backward", 3),
        ("torch", "all arrived", 3),
        ("torch", "before there are buckets", 1),
        ("torch", "optimizer", 3),
    }
    every = chain(product(PROCESS_FABRICS, faulty.PLACES, (1, 2, 3)), product(PROCESS_FABRICS, faulty.FIRST_STEP, (1,)))
    return [kill if kill in now else pytest.param(*kill, marks=pytest.mark.slow) for kill in every]


def assert_lost(rank: Trained, victim: int) -> None:
    """A survivor names the victim, soon."""
    assert (rank.error, rank.culprit) == ("PeerLost", victim), rank.message
    assert f"rank {victim} " in rank.message
    assert rank.seconds < within(SOON_S)


@pytest.mark.parametrize(("fabric", "place", "step"), kills())
def test_survivors_of_a_kill_have_the_parameters_of_their_last_whole_step(
    fabric: str, place: str, step: int, tmp_path: Path
) -> None:
    survivors = survivors_of(Strikes(VICTIM, step, place, faulty.killed), fabric, tmp_path, deadline_s=20.0)
    expected = undisturbed(fabric)
    completed = [len(rank.parameters) - 1 for rank in survivors.values()]
    assert set(completed) <= ({step - 1, step} if place in faulty.MAY_BE_WHOLE else {step - 1})
    for rank in survivors.values():
        assert_lost(rank, VICTIM)
        assert same(rank.at_the_end, rank.parameters[-1])
        for mine, theirs in zip(rank.parameters, expected.parameters, strict=False):
            assert same(mine, theirs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
@pytest.mark.parametrize(("place", "victim"), [*product(faulty.CONSTRUCTION, (0, VICTIM))])
def test_survivors_of_a_kill_while_sync_is_made_are_told_and_have_whole_parameters(
    fabric: str, place: str, victim: int, tmp_path: Path
) -> None:
    """Those of rank 0 come one after the other; the rest are their own."""
    survivors = survivors_of(Strikes(victim, 0, place, faulty.killed), fabric, tmp_path, deadline_s=20.0)
    given = snapshot(filled(Net(), seed=0))
    for number, rank in survivors.items():
        assert_lost(rank, victim)
        own = snapshot(filled(Net(), seed=number))
        arrived = sum(same([one], [theirs]) for one, theirs in zip(rank.at_the_end, given, strict=True))
        assert same(rank.at_the_end, given[:arrived] + own[arrived:])
        assert number == 0 or arrived <= (3 if place == "between parameters" else 0)
