"""The benchmark: it takes part with everyone who is here, and it does not believe wrong answers."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from syncline.bench.collectives import Results, Row
from syncline.bench.contenders import CONTENDERS, NEEDS
from syncline.bench.plot import write_plot
from syncline.bench.timing import Contender, measure, pattern
from syncline.cli.main import app


def needed(name: str) -> None:
    """Skip where a peer is not installed, unless all of them are required."""
    if name in NEEDS and not shutil.which(NEEDS[name]) and not os.environ.get("SYNCLINE_REQUIRE_ALL"):
        pytest.skip(f"{NEEDS[name]} is not installed")


@pytest.mark.needs_mpi
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_is_measured_and_right(name):
    needed(name)
    times = CONTENDERS[name](2, [1024, 200_000], 2)
    assert list(times) == [1024, 200_000]
    assert all(len(seconds) == 2 for seconds in times.values())


def alone(call) -> Contender:
    buffer = np.zeros(1000, np.float32)
    return Contender(buffer, 0, 1, lambda: call(buffer), lambda: None)


def test_a_wrong_answer_stops_the_benchmark():
    assert len(measure(alone(lambda buffer: None), 2)) == 2
    with pytest.raises(AssertionError, match="a wrong sum of 1000 elements"):
        measure(alone(lambda buffer: buffer.__setitem__(500, 0.5)), 2)


def test_inputs_differ_by_rank_and_by_turn():
    seen = {tuple(pattern(10, rank, turn)) for rank in range(3) for turn in (0, 1)}
    assert len(seen) == 6


def test_comparisons_are_with_the_fastest_of_the_others():
    rows = [Row("syncline", 2, 1000, 1.0, 1.0), Row("open mpi", 2, 1000, 4.0, 4.0), Row("mpich", 2, 1000, 3.0, 3.0)]
    results = Results(rows)
    assert results.times_faster(["open mpi", "mpich"], 2, 1000) == 3.0
    assert results.times_faster(["gloo"], 2, 1000) is None


def test_the_plot_needs_nothing_else(tmp_path):
    page = tmp_path / "plot.html"
    write_plot(Results([Row("syncline", 2, size, 1e-6 * size, 1e-6) for size in (1000, 2000)]), page)
    text = page.read_text()
    assert "syncline" in text
    assert "<script src=" not in text


@pytest.mark.timeout(120)
def test_the_command_prints_figures_for_programs():
    arguments = ["bench", "collectives", "--ranks", "2", "--sizes", "1KB", "--repeats", "1", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--contenders", "syncline,limit"], catch_exceptions=False)
    rows = json.loads(result.stdout)["rows"]
    assert {row["contender"] for row in rows} == {"syncline", "limit"}
    assert all(row["median_s"] > 0 for row in rows)
