"""A child that a rank forks is not a rank: it is refused at once, and whatever it does the parent goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import syncline
from support.catalogue import FABRICS, PROCESS_FABRICS, one_now_others_slow
from support.forking import calls_in_a_child, children_that_end, training_in_a_child
from support.patience import within
from support.replicas import same
from support.scripts import run_script
from syncline import Deadlines


def patient() -> Deadlines:
    """Deadlines for ranks whose parents wait for children that are forked."""
    return Deadlines(within(20.0, most=50.0))


MODES = ("sync", "delayed", "local:every=4", "diloco:every=4", "slowmo:every=4", "async", "bounded:ahead=0")
QUIET = ("close at once", "close", "fabric")  # of a fabric
everywhere = pytest.mark.parametrize("fabric", FABRICS)


def assert_refused(found: dict[str, tuple[str, float]], quiet: tuple[str, ...]) -> None:
    for name, (error, seconds) in found.items():
        assert error == ("nothing" if name in quiet else "FabricClosed"), name
        assert seconds < within(2.0), name


@everywhere
def test_calls_of_a_forked_child_are_refused_at_once(fabric: str) -> None:
    for found, total in syncline.run(calls_in_a_child, 2, fabric, patient()):
        assert len(found) == 15
        assert_refused(found, QUIET)
        assert total == 6.0 + 20.0


@everywhere
@pytest.mark.parametrize("mode", one_now_others_slow(MODES))
def test_training_of_a_forked_child_is_refused_and_that_of_the_parent_goes_on(fabric: str, mode: str) -> None:
    work = partial(training_in_a_child, mode=mode, forks=True)
    twins = syncline.run(partial(training_in_a_child, mode=mode, forks=False), 2, fabric, patient())
    for (found, mine), (_, theirs) in zip(syncline.run(work, 2, fabric, patient()), twins, strict=True):
        assert len(found) == 7
        assert_refused(found, QUIET[2:])
        assert mode == "async" or same(mine, theirs)


@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS))
def test_a_forked_child_that_ends_disturbs_nobody(fabric: str) -> None:
    for codes, error, total in syncline.run(children_that_end, 2, fabric, patient()):
        assert codes == [3, 4, 5, 1]
        assert error == "FabricClosed"
        assert total == 6.0


SCRIPT = """
    import os
    import sys
    import torch
    import syncline
    from support.forking import ended_within, one_step, trains

    fabric = syncline.init(fabric=sys.argv[1])
    model, optimizer, sync = trains(fabric, "sync")
    child = os.fork()
    if child:
        assert ended_within(child, 20.0) == 0
        one_step(fabric, model, optimizer, 2)
        sync.close()
        print("parent", fabric.all_reduce(torch.ones(1)).item())
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", one_now_others_slow(["torch", "shm"]))
def test_a_forked_child_that_comes_to_the_end_of_the_script_disturbs_nobody(tmp_path: Path, fabric: str) -> None:
    for done in run_script(tmp_path, SCRIPT, 2, fabric):
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "parent 2.0"
