"""When all ranks had come to a bucket, from what they say in the status of its pass."""

from __future__ import annotations

from functools import partial

import pytest

import syncline
from support import traced
from syncline import Deadlines
from syncline.core.status import PassStatus
from syncline.fabric.handle import Times
from syncline.path.readiness import LATEST_US, UNKNOWN, Readiness, met_by
from syncline.tracing.spans import BucketSpan, StepSpan

MS = 1_000_000


def status_of(*ready_us: tuple[int, int]) -> PassStatus:
    return PassStatus(False, (), tuple(range(len(ready_us))), ready_us=ready_us)


def test_ranks_whose_clocks_differ_tell_each_other_when_they_were_ready() -> None:
    mine, other = Readiness(), Readiness()
    mine.status_ended(5, 1_000 * MS)
    other.status_ended(5, 77_000 * MS)
    ours = mine.own(7, [1_010 * MS, 1_015 * MS, 1_030 * MS])
    theirs = other.own(7, [77_020 * MS, 77_021 * MS, 77_024 * MS])
    status = status_of(ours, theirs)
    assert [mine.met_ns(status, 7, place) for place in (0, 0.5, 1)] == [1_020 * MS, 1_022 * MS, 1_030 * MS]
    assert [other.met_ns(status, 7, place) for place in (0, 0.5, 1)] == [77_020 * MS, 77_022 * MS, 77_030 * MS]


def test_without_a_shared_moment_nothing_is_said_or_known() -> None:
    readiness = Readiness()
    assert readiness.own(1, [5 * MS]) == UNKNOWN
    readiness.status_ended(1, 9 * MS)
    assert readiness.own(2, [15 * MS]) == UNKNOWN  # the status of pass 1 may still be under way where passes lag
    assert readiness.own(3, []) == UNKNOWN  # no bucket
    assert readiness.own(3, [15 * MS]) == (6000, 6000)
    assert readiness.met_ns(status_of((6000, 6000), UNKNOWN), 3, 0) is None


def test_what_is_said_fits_a_word() -> None:
    readiness = Readiness()
    readiness.status_ended(1, 0)
    assert readiness.own(3, [-1, 10**16]) == (1, LATEST_US)


def test_a_call_was_met_between_its_beginning_and_its_end() -> None:
    times = Times(10, 10, 30)
    assert [met_by(times, met, 50).met_ns for met in (5, 20, 40, None)] == [10, 20, 30, 30]
    assert met_by(Times(10, 15, 30), 20, 50).met_ns == 15  # a fabric that knows it itself


def first_buckets(steps: list[StepSpan]) -> list[BucketSpan]:
    """The first bucket of every step from the third on, when ranks share a moment."""
    return [next(span for span in step.buckets if span.bucket == 0) for step in steps[2:]]


@pytest.mark.parametrize("codec", ["none", "topk:0.5"])
def test_over_an_engine_a_rank_waits_for_the_slow_one_and_that_one_for_nobody(codec: str) -> None:
    train = partial(traced.spans_of_training, steps=6, slow=1, codec=codec)
    fast, slow = (first_buckets(steps) for steps in syncline.run(train, 2, "torch", Deadlines(20.0)))
    assert all(span.met_ns - span.began_ns > 0.5e9 * traced.SLEEP_S for span in fast)
    assert all(span.met_ns - span.began_ns < 0.5 * (span.ended_ns - span.began_ns) for span in slow)
