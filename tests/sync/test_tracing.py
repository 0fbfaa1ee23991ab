"""What steps cost: totals from spans, in closed form, and what training reports of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from functools import cache, partial
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

import syncline
from support import guarded, traced
from support.catalogue import FABRICS
from support.guarded import ONE_EACH, Net, Spoils, Trained, train
from syncline import Deadlines
from syncline.tracing.spans import BucketSpan, Recorder, StepSpan
from syncline.tracing.totals import mean_totals, totals_of

MS = 1_000_000
GRADIENT_BYTES = 4 * sum(parameter.numel() for parameter in Net().parameters())


def span(bucket: int, nbytes: int, sent_bytes: int, *moments_ns: int) -> BucketSpan:
    """Moments: ready, begun, met and ended, and waited for from and to."""
    return BucketSpan(bucket, nbytes, sent_bytes, *moments_ns)


HIDDEN = span(0, 100, 10, 1 * MS, 2 * MS, 3 * MS, 6 * MS, 20 * MS, 20 * MS)
EXPOSED = span(1, 28, 4, 18 * MS, 20 * MS, 24 * MS, 29 * MS, 20 * MS, 30 * MS)


# From spans to totals


def test_the_totals_of_a_step_have_their_closed_forms() -> None:
    totals = totals_of(StepSpan(0, 50 * MS, False, (HIDDEN, EXPOSED)))
    assert (totals.steps, totals.nbytes, totals.sent_bytes, totals.skipped) == (1, 128, 14, 0)
    assert totals.step_s == pytest.approx(0.050)
    assert totals.exposed_s == pytest.approx(0.010)
    assert totals.compute_s == pytest.approx(0.040)
    assert totals.hidden_s == pytest.approx(0.013 - 0.010)
    assert totals.waiting_s == pytest.approx(0.001 + 0.004)
    assert totals.exposed_share == pytest.approx(0.2)


def test_a_step_without_communication_is_all_compute() -> None:
    totals = totals_of(StepSpan(5 * MS, 12 * MS, True, ()))
    assert (totals.steps, totals.skipped, totals.nbytes, totals.sent_bytes) == (1, 1, 0, 0)
    assert (totals.step_s, totals.compute_s) == (0.007, 0.007)
    assert (totals.exposed_s, totals.hidden_s, totals.waiting_s) == (0.0, 0.0, 0.0)
    assert totals.exposed_share == 0.0


def test_a_step_that_took_no_time_has_no_share_exposed() -> None:
    assert totals_of(StepSpan(7, 7, False, ())).exposed_share == 0.0


@given(st.lists(st.lists(st.integers(0, 10**9), min_size=4, max_size=4), max_size=5), st.integers(1, 10**9))
def test_exposed_and_compute_add_up_to_the_step(moments: list[list[int]], extra: int) -> None:
    """For buckets one after the other, each waited for after it began."""
    clock, spans = 0, []
    for begins, meets, ends, waits in moments:
        began = clock + begins
        met, ended = began + meets, began + meets + ends
        spans.append(span(len(spans), 1, 1, began, began, met, ended, max(clock, ended - waits), ended))
        clock = ended
    totals = totals_of(StepSpan(0, clock + extra, False, tuple(spans)))
    assert totals.exposed_s + totals.compute_s == pytest.approx(totals.step_s)
    assert 0 <= totals.exposed_s <= totals.step_s
    assert totals.hidden_s >= 0
    assert totals.waiting_s >= 0


def test_the_totals_of_steps_are_means_and_skipped_ones_are_counted() -> None:
    one = StepSpan(0, 50 * MS, True, (HIDDEN, EXPOSED))
    other = StepSpan(50 * MS, 80 * MS, True, (HIDDEN,))
    totals = mean_totals([one, other, StepSpan(80 * MS, 90 * MS, False, ())])
    assert (totals.steps, totals.skipped) == (3, 2)
    assert totals.step_s == pytest.approx(0.030)
    assert totals.exposed_s == pytest.approx(0.010 / 3)
    assert totals.compute_s == pytest.approx(0.080 / 3)
    assert totals.hidden_s == pytest.approx((0.003 + 0.004) / 3)
    assert totals.waiting_s == pytest.approx((0.005 + 0.001) / 3)
    assert totals.nbytes == round(228 / 3)
    assert totals.sent_bytes == round(24 / 3)


def test_no_steps_cost_nothing() -> None:
    assert not any(astuple(mean_totals([])))
    assert "0 steps" in str(mean_totals([]))


def test_totals_can_be_read() -> None:
    text = str(mean_totals([StepSpan(0, 50 * MS, False, (HIDDEN, EXPOSED))]))
    for part in ("50 ms a step over 1 steps", "compute 40 ms", "exposed communication 10 ms (20.0 %)", "128 B"):
        assert part in text, text


# The recorder


def test_a_step_begins_where_the_one_before_has_ended() -> None:
    recorder = Recorder()
    recorder.begin(5)
    recorder.buckets.append(HIDDEN)
    recorder.end_step(10, skipped=False)
    recorder.buckets += [EXPOSED, HIDDEN]
    recorder.end_step(30, skipped=True)
    recorder.end_step(31, skipped=False)
    assert list(recorder.steps) == [
        StepSpan(5, 10, False, (HIDDEN,)),
        StepSpan(10, 30, True, (EXPOSED, HIDDEN)),
        StepSpan(30, 31, False, ()),
    ]


def test_the_recorder_keeps_the_last_steps() -> None:
    recorder = Recorder(steps=3)
    for now in range(1, 11):
        recorder.end_step(now, skipped=False)
    assert [step.ended_ns for step in recorder.steps] == [8, 9, 10]


# What training reports


def trained(fabric: str, steps: int, world: int = 2, **settings: object) -> list[Trained]:
    return syncline.run(partial(train, steps=steps, **settings), world, fabric, Deadlines(20.0))


@pytest.mark.parametrize(("fabric", "buckets"), [("threads", {}), *((fabric, ONE_EACH) for fabric in FABRICS)], ids=str)
def test_a_report_counts_steps_and_bytes(fabric: str, buckets: dict) -> None:
    for rank in trained(fabric, 6, **buckets):
        totals = rank.totals
        assert (totals.steps, totals.nbytes, totals.skipped) == (6, GRADIENT_BYTES, 0)
        assert totals.exposed_s + totals.compute_s == pytest.approx(totals.step_s)
        assert 0 < totals.exposed_s < totals.step_s
        assert totals.hidden_s >= 0
        assert totals.waiting_s > 0


def test_a_report_counts_skipped_steps() -> None:
    for rank in trained("threads", 6, poison=Spoils(0, (2, 3), float("nan"))):
        assert (rank.totals.steps, rank.totals.skipped) == (6, 2)


def test_a_world_of_one_waits_for_nobody() -> None:
    (rank,) = trained("threads", 4, world=1)
    totals = rank.totals
    assert (totals.steps, totals.exposed_s, totals.hidden_s, totals.waiting_s) == (4, 0.0, 0.0, 0.0)
    assert totals.compute_s == totals.step_s > 0


def test_two_optimizers_send_gradients_once() -> None:
    """However steps are counted, each gradient travels once."""
    for rank in syncline.run(partial(guarded.train_with_two_optimizers, steps=5), 2, "threads", Deadlines(20.0)):
        assert rank.totals.steps * rank.totals.nbytes == 5 * GRADIENT_BYTES


@cache
def with_a_slow_rank(fabric: str) -> list[list[StepSpan]]:
    """Four steps of two ranks, of which rank 1 sleeps in every forward pass."""
    return syncline.run(partial(traced.spans_of_training, steps=4, slow=1), 2, fabric, Deadlines(20.0))


def assert_first_waits_for_second(fast: Sequence[StepSpan], slow: Sequence[StepSpan]) -> None:
    """One has as exposed waiting what the other one came later, as both clocks have it, whatever else the machine does.

    Sleep is the least that the other one computes. What it waits itself is only what the machine makes it wait.
    """
    pairs = [(one.buckets[0], two.buckets[0].ready_ns) for one, two in zip(fast, slow, strict=True)]
    waited_s = mean(max(0, ready_ns - one.began_ns) / 1e9 for one, ready_ns in pairs)
    exposed_s = mean(max(0, ready_ns - one.waited_from_ns) / 1e9 for one, ready_ns in pairs)
    first, second = mean_totals(fast), mean_totals(slow)
    assert first.waiting_s >= waited_s
    assert first.exposed_s >= exposed_s
    assert first.compute_s <= first.step_s - exposed_s + 1e-9
    assert second.compute_s > traced.SLEEP_S
    assert second.waiting_s < first.waiting_s


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_slow_rank_is_waited_for_by_the_others_and_waits_for_nobody(fabric: str) -> None:
    fast, slow = with_a_slow_rank(fabric)
    assert_first_waits_for_second(fast[1:], slow[1:])


@pytest.mark.parametrize("fabric", FABRICS)
def test_to_wait_in_the_first_step_is_not_to_compute(fabric: str) -> None:
    fast, slow = with_a_slow_rank(fabric)
    assert_first_waits_for_second(fast[:1], slow[:1])


@pytest.mark.parametrize("fabric", FABRICS)
def test_the_seams_of_every_bucket_are_in_order(fabric: str) -> None:
    for steps in syncline.run(partial(traced.spans_of_training, steps=3), 2, fabric, Deadlines(20.0)):
        assert len(steps) == 3
        for step in steps:
            sent = [one for one in step.buckets if one.bucket >= 0]
            assert [one.bucket for one in sent] == list(range(6))
            for one in sent:
                assert step.began_ns < one.ready_ns <= one.began_ns <= one.met_ns <= one.ended_ns
                assert one.waited_from_ns <= one.waited_to_ns < step.ended_ns
                assert one.ended_ns <= one.waited_to_ns <= one.applied_ns < step.ended_ns
        for before, after in pairwise(steps):
            assert before.ended_ns == after.began_ns


def spans_of_threads(world: int = 3, **settings: object) -> list[list[StepSpan]]:
    return syncline.run(partial(traced.spans_of_training, steps=4, **settings), world, "threads", Deadlines(20.0))


@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.1"])
def test_a_bucket_is_applied_when_a_codec_has_written_its_means(codec: str) -> None:
    for steps in spans_of_threads(codec=codec):
        for step in steps:
            for one in (one for one in step.buckets if one.bucket >= 0):
                assert one.waited_to_ns <= one.applied_ns < step.ended_ns
            sent = [one for one in step.buckets if one.bucket >= 0]
            assert sum(one.ended_ns - one.began_ns for one in sent) >= step.encode_ns + step.decode_ns
            assert (step.decode_ns > 0) == (codec != "none")


def test_buckets_that_nobody_can_use_are_not_applied() -> None:
    for steps in spans_of_threads(codec="int8", bad=2):
        assert [step.skipped for step in steps] == [False, True, False, False]
        for step in steps:
            assert all(bool(one.applied_ns) != step.skipped for one in step.buckets if one.bucket >= 0)


def test_delayed_buckets_are_applied_one_step_after_they_left() -> None:
    for steps in spans_of_threads(mode="delayed"):
        assert len(steps) == 5  # with that of drain
        for before, step in pairwise(steps):
            arrived = [one for one in step.buckets if one.bucket >= 0]
            assert len(arrived) == 6
            for one in arrived:
                assert before.began_ns < one.ready_ns < before.ended_ns
                assert step.began_ns < one.waited_to_ns <= one.applied_ns < step.ended_ns


def test_means_of_parameters_are_applied_when_ranks_meet() -> None:
    for steps in spans_of_threads(mode="local:every=2"):
        met = [one for step in steps for one in step.buckets if one.bucket >= 0]
        assert [one.bucket for one in met] == list(range(6))
        assert all(one.waited_to_ns <= one.applied_ns for one in met)


def test_gradients_are_applied_when_servers_have_used_them() -> None:
    for steps in spans_of_threads(mode="async"):
        for step in steps:
            pushed = [one for one in step.buckets if one.bucket >= 0]
            assert len(pushed) == 6
            assert all(step.ended_ns < one.applied_ns for one in pushed)
