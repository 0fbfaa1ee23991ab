"""The examples do what their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from syncline.workloads.gpt import SHAPES, make_gpt

EXAMPLES = Path(__file__).parent.parent / "examples"


def torchrun(ranks: int, example: str, *options: object) -> str:
    """What it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    whole = [*command, str(EXAMPLES / example), *map(str, options)]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(120)
def test_one_line_lets_processes_learn_together():
    printed = torchrun(2, "first_diff.py")
    assert float(re.search(r"loss ([\d.]+)", printed)[1]) < 0.1
    assert "exposed" in printed


@pytest.mark.timeout(120)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [["--codec", "int8", "--accumulate", 2], ["--fabric", "torch"]], ids=str)
def test_a_gpt_learns(options):
    printed = torchrun(2, "train_gpt.py", "--size", "5M", "--steps", 10, "--batch", 2, *options)
    assert float(re.search(r"step 10: loss ([\d.]+)", printed)[1]) < 4.5  # it begins at 5.5


@pytest.mark.timeout(120)
@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_sites_train_apart_and_end_with_one_model(tmp_path, streaming):
    saved = tmp_path / "model.pt"
    options = ["--steps", 8, "--every", 8, "--save", saved] + ["--streaming"] * streaming
    printed = torchrun(2, "two_sites_diloco.py", *options)
    assert "step 8: loss" in printed
    start, end = make_gpt(SHAPES["5M"]).state_dict(), torch.load(saved)
    assert start.keys() == end.keys()
    assert all(end[name].isfinite().all() and not torch.equal(end[name], start[name]) for name in start)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ahead", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_fast_workers_of_a_server_go_on_within_their_bound(tmp_path, ahead):
    options = ["--seconds", 3, "--save", tmp_path / "model.pt"] + (["--ahead", ahead] if ahead is not None else [])
    printed = torchrun(3, "async_server.py", *options)
    steps = {int(rank): int(count) for rank, count in re.findall(r"worker (\d): (\d+) steps", printed)}
    assert set(steps) == {0, 1}, printed  # the third rank serves
    assert 0 < steps[0] < steps[1]
    if ahead is not None:
        # one step more is counted by a worker that may not go on until the slow one has left
        assert steps[1] - steps[0] <= ahead + 1
    assert torch.load(tmp_path / "model.pt")["embed.weight"].isfinite().all()


def test_examples_are_short():
    for example in EXAMPLES.glob("*.py"):
        assert len(example.read_text().splitlines()) <= 80, example
