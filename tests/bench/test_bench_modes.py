"""The benchmarks of modes: slow steps are as they are said to be, peaks are peaks, and the commands print figures."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from support.emulated_hosts import needs_hosts
from syncline.bench.plot_modes import write_straggler_plot
from syncline.bench.stragglers import Outcome, Pace
from syncline.cli.main import app
from syncline.errors import SynclineError, UnknownName


def call(*arguments: str) -> object:
    result = CliRunner().invoke(app, ["bench", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# Who is slow


def lengths(slow: list[bool]) -> list[int]:
    """Of bursts, two of which may touch."""
    text = "".join("#" if one else "." for one in slow)
    return [len(burst) for burst in text.split(".") if burst]


@pytest.mark.parametrize("situation", ["bursts", "one"])
def test_a_third_of_the_steps_of_a_worker_with_bursts_is_slow(situation):
    slow = Pace(situation=situation).slow_steps(3, 60_000)
    assert sum(slow) / len(slow) == pytest.approx(1 / 3, abs=0.02)
    assert min(lengths(slow)[:-1]) == (2 if situation == "bursts" else 10)


def test_who_is_slow():
    for situation, expected in (("bursts", {0, 1, 2, 3}), ("one", {3}), ("always", {3})):
        pace = Pace(situation=situation)
        assert {rank for rank in range(4) if any(pace.slow_steps(rank, 1000))} == expected
    assert all(Pace(situation="always").slow_steps(3, 1000))
    with pytest.raises(UnknownName, match="never"):
        Pace(situation="never")


def test_slow_steps_depend_on_the_seed_and_the_rank_alone():
    pace = Pace(situation="bursts")
    assert pace.slow_steps(1, 500) == pace.slow_steps(1, 1000)[:500]
    assert pace.slow_steps(1, 500) != pace.slow_steps(2, 500)
    assert pace.slow_steps(1, 500) != Pace(situation="bursts", seed=1).slow_steps(1, 500)


# What is made of what was seen


def outcome(mode: str, *curve: tuple[float, float]) -> Outcome:
    return Outcome("bursts", mode, 4.0, [10, 10, 10, 6], list(curve), 0.0)


def test_the_time_to_a_loss_is_between_two_snapshots():
    one = outcome("sync", (0.0, 5.0), (2.0, 3.0), (4.0, 2.0))
    assert one.steps_per_s == 9
    assert one.seconds_to(4.0) == pytest.approx(1.0)
    assert one.seconds_to(2.25) == pytest.approx(3.5)
    assert one.seconds_to(6.0) == 0.0
    assert one.seconds_to(1.9) is None


def test_the_plot_needs_nothing_else(tmp_path):
    page = tmp_path / "plot.html"
    write_straggler_plot([outcome("sync", (0.0, 5.0)), outcome("async", (0.0, 5.0))], page)
    text = page.read_text()
    assert "async" in text
    assert "<script src=" not in text


# The commands


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_only_modes_without_a_bound_leave_a_slow_worker_behind():
    rows = call("stragglers", "--slow", "always", "--modes", "sync;local:every=4;async", "--seconds", "2")
    found = {row["mode"]: row for row in rows}
    assert len(set(found["sync"]["steps"])) == 1
    assert max(found["local:every=4"]["steps"]) - min(found["local:every=4"]["steps"]) <= 4
    assert min(found["async"]["steps"][:3]) > 1.5 * found["async"]["steps"][3]
    assert all(row["curve"][-1][1] < row["curve"][0][1] for row in rows)  # all of them learn


@pytest.mark.slow
@pytest.mark.needs_net
@pytest.mark.timeout(240)
def test_modes_are_compared_over_a_slow_network():
    needs_hosts()
    ddp, local = call("modes", "--hosts", "2", "--steps", "8", "--methods", "local:every=4")
    assert (ddp["method"], ddp["times_ddp"], ddp["more_loss"]) == ("ddp", 1.0, 0.0)
    assert local["times_ddp"] > 1
    # two hosts exchange the whole model: in every step, or every four
    assert ddp["sent_bytes_per_step"] == pytest.approx(4 * local["sent_bytes_per_step"], rel=0.2)
    assert 0.5 * 100e6 / 8 < ddp["peak_1s"] <= 1.2 * 100e6 / 8


@pytest.mark.parametrize("arguments", [["stragglers", "--slow", "never"], ["stragglers", "--modes", "synk"]])
def test_what_cannot_be_measured_is_refused(arguments):
    with pytest.raises(SynclineError):
        call(*arguments)
