"""Metering: it sees a process that is busy, and not the benchmark itself; disturbed work is done again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syncline.bench import metering
from syncline.bench.metering import Meter, Metered, cleanest, is_clean

SPIN = "while True: pass"


@contextmanager
def busy_process() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def until_it_has_had(pid: int, seconds: float) -> None:
    """Wait until a process has had so much processor time, however busy the machine is."""
    ticks = dict(metering.each_process())[pid][1] + seconds * metering.TICKS_PER_S
    while dict(metering.each_process())[pid][1] < ticks:
        time.sleep(0.01)


def test_a_busy_process_elsewhere_is_seen():
    with busy_process() as pid:
        stranger = Meter(root=pid + 10**7)  # a benchmark of which no process here is part
        assert stranger.run(lambda: until_it_has_had(pid, 0.3)).busy_elsewhere > 0


def test_time_of_a_process_that_has_ended_is_not_lost():
    stranger = Meter(root=10**8)
    before = stranger.seconds_elsewhere()
    with busy_process() as pid:
        until_it_has_had(pid, 0.3)
    assert stranger.seconds_elsewhere() - before >= 0.3


def one_process(monkeypatch, *readings: dict[int, tuple[int, int]]) -> None:
    """Replace what can be seen: for every reading, processes with their parent and their seconds."""
    found = iter(readings)
    as_ticks = metering.TICKS_PER_S
    monkeypatch.setattr(
        metering, "each_process", lambda: [(pid, (up, s * as_ticks)) for pid, (up, s) in next(found).items()]
    )


def test_the_benchmark_and_its_children_are_not_elsewhere(monkeypatch):
    own, child, grandchild, other = 100, 50, 200, 300
    before = {own: (1, 0), child: (own, 0), grandchild: (child, 0), other: (1, 7)}
    after = {own: (1, 500), child: (own, 500), grandchild: (child, 500), other: (1, 9)}
    one_process(monkeypatch, before, after)
    meter = Meter(root=own)
    seen = meter.seconds_elsewhere(), meter.seconds_elsewhere()
    assert seen[1] - seen[0] == pytest.approx(2, abs=0.5)  # what the host stole meanwhile is in it


def test_a_clean_machine_is_clean(monkeypatch):
    one_process(monkeypatch, {os.getpid(): (1, 0)}, {os.getpid(): (1, 10)})
    monkeypatch.setattr(metering, "stolen_ticks", lambda: 0)
    assert Meter().run(lambda: 7) == Metered(7, 0.0)
    assert is_clean(0.0)
    assert is_clean(0.1)
    assert not is_clean(0.11)


@pytest.mark.parametrize(
    ("readings", "expected"),
    [([0.05], ("try 1", 0.05)), ([0.5, 0.0], ("try 2", 0.0)), ([0.5, 0.2, 0.4], ("try 2", 0.2))],
)
def test_disturbed_work_is_done_again_a_few_times_and_the_best_counts(readings, expected):
    tries, agreed = iter(("try 1", "try 2", "try 3")), iter(readings)
    assert cleanest(lambda: next(tries), Meter(), lambda _: next(agreed)) == expected
    assert next(agreed, None) is None
