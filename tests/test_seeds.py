"""Random numbers come back with their seed: those of tests with the one that a failure prints."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import syncline
from support.references import same_bits
from support.trainees import place_of
from syncline.workloads.mlp import make_mlp

ROOT = Path(__file__).parents[1]
FAILING = """
import random
import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

def test_one(): assert not [torch.rand(3).tolist(), random.random(), float(numpy.random.rand())]

@given(st.integers())
def test_search(number):
    drawn = torch.rand(1)
    assert number < 1000
"""


def run(folder: Path, *options: str) -> str:
    """What a run of failing tests prints, but for how long it took."""
    file = folder / "test_failing.py"
    file.write_text(FAILING)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "conftest",
        str(file),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=50)
    assert done.returncode == 1, done.stdout + done.stderr
    return re.sub(r"in [\d.]+s", "", done.stdout)


@pytest.mark.slow
def test_the_seed_that_a_failure_prints_brings_its_numbers_back(tmp_path: Path) -> None:
    first, again, other = (run(tmp_path, "--seed", seed, "-q") for seed in ("4", "4", "5"))
    assert first == again
    assert len(re.findall(r"\d+, of the name of the test and --seed 4", first)) == 2
    assert "@reproduce_failure" in first
    numbers = [re.search(r"assert not \[\[.*", text)[0] for text in (first, other)]
    assert numbers[0] != numbers[1]


@pytest.mark.slow
def test_a_random_order_is_told_and_comes_back(tmp_path: Path) -> None:
    options = ("--random-order", "--random-order-seed=11")
    first, again = run(tmp_path, *options), run(tmp_path, *options)
    assert first == again
    assert "--random-order-seed=11" in first


def test_models_have_the_weights_of_their_seed_on_ranks_that_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = torch.manual_seed

    def seed_slowly(seed: int) -> torch.Generator:
        generator = usual(seed)
        time.sleep(0.05)
        return generator

    alone = [place_of(make_mlp(8, 2, seed)) for seed in range(3)]
    monkeypatch.setattr(torch, "manual_seed", seed_slowly)
    together = syncline.run(lambda fabric: place_of(make_mlp(8, 2, fabric.rank)), 3, "threads")
    assert all(map(same_bits, together, alone))
