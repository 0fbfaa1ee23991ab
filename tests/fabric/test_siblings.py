"""The new parts of fabrics: siblings, notes, the times of a call, and closing while calls are under way."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import syncline
from support import families, notes
from support.catalogue import FABRICS, PROCESS_FABRICS, one_now_others_slow
from support.families import Ended
from support.patience import within
from syncline import Deadlines
from syncline.errors import ConfigError, RankFailed
from syncline.fabric.health import NO_PROGRESS
from syncline.fabric.threads import Threads

PATIENT = Deadlines(20.0)
DEADLINE_S, SOON_S = 3.0, 2.5
everywhere = pytest.mark.parametrize("fabric", FABRICS)


# Siblings


@everywhere
@pytest.mark.parametrize("world", one_now_others_slow([2, 3]))
def test_calls_on_siblings_need_no_common_order(fabric: str, world: int) -> None:
    expected = [([world * (world + 1) / 2], [100.0 * turn * world]) for turn in range(5)]
    work = partial(families.start_in_opposite_orders, turns=5)
    assert syncline.run(work, world, fabric, PATIENT) == [expected] * world


@everywhere
def test_siblings_have_siblings_and_all_of_them_work_at_once(fabric: str) -> None:
    results = syncline.run(families.use_a_family, 3, fabric, PATIENT)
    for rank, members in enumerate(results):
        assert members == [(rank, 3, 6.0 * 10**position) for position in range(4)]


@everywhere
@pytest.mark.parametrize("drain", one_now_others_slow([True, False]))
def test_closing_a_fabric_closes_its_siblings_and_theirs(fabric: str, drain: bool) -> None:
    for outcomes in syncline.run(partial(families.close_the_parent, drain=drain), 2, fabric, PATIENT):
        assert [kind for kind, _, _ in outcomes] == ["FabricClosed"] * 8
        assert max(seconds for _, _, seconds in outcomes) < within(1.0)


@everywhere
def test_closing_a_sibling_leaves_the_fabric_it_was_made_from(fabric: str) -> None:
    for (kind, _, _), total in syncline.run(families.close_a_sibling_only, 2, fabric, PATIENT):
        assert (kind, total) == ("FabricClosed", 3.0)


@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS[::-1]))
def test_twenty_siblings_leave_no_descriptors_and_no_threads_behind(fabric: str) -> None:
    results = syncline.run(partial(families.make_and_close_siblings, count=20), 2, fabric, PATIENT)
    assert results == [(0, 0)] * 2


def test_one_that_is_killed_while_a_sibling_is_made_is_named() -> None:
    with pytest.raises(RankFailed, match="was ended by SIGKILL") as caught:
        syncline.run(partial(families.lose_one_who_has_joined, victim=0), 3, "torch", PATIENT)
    assert [found[:2] for found in caught.value.results.values()] == [("PeerLost", 0)] * 2


# Closing


@everywhere
def test_closing_waits_for_what_was_started(fabric: str) -> None:
    assert syncline.run(partial(families.close_with_patience, late=1), 2, fabric, PATIENT) == [(3.0, True)] * 2


def closed(fabric: str, world: int, closes: int, start: tuple[int, ...], folder: Path) -> list[Ended]:
    work = partial(families.close_while_under_way, closes=closes, start=start, folder=str(folder))
    return syncline.run(work, world, fabric, Deadlines(DEADLINE_S))


def assert_gave_up(ended: Ended) -> None:
    """The rank that closed knows that it was itself, at once."""
    assert [kind in {"FabricClosed", "PeerAborted"} for kind, _, _ in ended.calls] == [True] * 2, ended
    assert max(seconds for _, _, seconds in ended.calls) < within(1.0)
    assert ended.closing_s < within(SOON_S)


@everywhere
@pytest.mark.parametrize("closes", one_now_others_slow([1, 0]))
def test_closing_without_patience_ends_what_this_rank_has_under_way(fabric: str, closes: int, tmp_path: Path) -> None:
    results = closed(fabric, 2, closes, (closes,), tmp_path)
    assert_gave_up(results[closes])
    ((kind, culprit, seconds),) = results[1 - closes].calls
    assert kind in {"PeerLost", "PeerAborted"}
    assert culprit == closes
    assert seconds < within(SOON_S)


@everywhere
@pytest.mark.parametrize("closes", one_now_others_slow([1, 0]))
def test_closing_without_patience_wakes_those_who_wait(fabric: str, closes: int, tmp_path: Path) -> None:
    for kind, culprit, seconds in closed(fabric, 2, closes, (1 - closes,), tmp_path)[1 - closes].calls:
        assert kind in {"PeerLost", "PeerAborted"}
        assert culprit == closes
        assert seconds < within(SOON_S)


@pytest.mark.sampled(1)
@everywhere
@pytest.mark.parametrize("closes", one_now_others_slow([1, 0]))
def test_closing_without_patience_ends_a_call_that_all_but_one_have_begun(
    fabric: str, closes: int, tmp_path: Path
) -> None:
    """Who waits for the absent rank 2 may blame it when its deadline has come, but never itself."""
    results = closed(fabric, 3, closes, (0, 1), tmp_path)
    assert_gave_up(results[closes])
    for kind, culprit, seconds in results[1 - closes].calls:
        assert kind in {"PeerLost", "PeerAborted", "PeerStalled"}
        assert culprit in {closes, 2}
        assert seconds < DEADLINE_S + within(SOON_S)


# Notes


@everywhere
def test_every_rank_reads_the_notes_of_all(fabric: str) -> None:
    for nothing, first, second, of_sibling in syncline.run(
        partial(notes.exchange_notes, within_s=15.0), 3, fabric, PATIENT
    ):
        assert nothing == of_sibling == [NO_PROGRESS] * 3
        assert first == [notes.note_for(rank, 1) for rank in range(3)]
        assert second == [notes.note_for(rank, 2) for rank in range(3)]


@everywhere
def test_a_note_of_a_rank_that_is_not_there_is_refused(fabric: str) -> None:
    if fabric == "threads":
        with Threads().group(1).fabric(0) as alone, pytest.raises(ConfigError, match="1 is not a rank"):
            alone.health.progress_of(1)
        return
    with pytest.raises(RankFailed) as caught:
        syncline.run(partial(notes.notes_seen_beyond), 2, fabric, PATIENT)
    assert all(isinstance(error, ConfigError) for error in caught.value.failures.values())


@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
@pytest.mark.parametrize("victim", one_now_others_slow([1, 0]))
def test_the_note_of_a_stopped_rank_can_be_read(fabric: str, victim: int, tmp_path: Path) -> None:
    work = partial(notes.read_the_note_of_a_stopped_rank, victim=victim, folder=str(tmp_path))
    with pytest.raises(RankFailed, match="was ended by SIGKILL") as caught:
        syncline.run(work, 3, fabric, PATIENT)
    assert list(caught.value.failures) == [victim]
    assert len(caught.value.results) == 2
    for state, note, seconds in caught.value.results.values():
        assert (state, note) == ("T", (7, 8, 9, 10))
        assert seconds < within(1.0)


# Times


@everywhere
def test_the_times_of_a_call_say_who_waited_for_whom(fabric: str) -> None:
    early, late = syncline.run(partial(notes.times_with_a_late_rank, late=1, seconds=0.3), 2, fabric, PATIENT)
    for times in (early, late):
        assert times == sorted(times)
    assert early[2] - early[1] >= 0.25e9
    assert late[2] - late[1] < 0.2e9
    assert abs(early[2] - late[2]) < 0.2e9


@everywhere
def test_calls_happen_one_after_the_other(fabric: str) -> None:
    for times in syncline.run(partial(notes.times_of_many, count=8), 2, fabric, PATIENT):
        flat = [time for call in times for time in call]
        assert flat == sorted(flat)
        assert flat[0] > 0
