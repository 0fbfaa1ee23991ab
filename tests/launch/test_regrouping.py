"""A process group that is destroyed, and others after it: fabrics are those of the group that there is."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import syncline
from support.catalogue import one_now_others_slow
from support.regrouping import asks_inside_run, close_after_destroying, join_a_group_later, regroup
from syncline import Deadlines

MODES = ("sync", "delayed", "local:every=2", "diloco:every=2", "slowmo:every=2", "async", "bounded")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", one_now_others_slow(MODES))
@pytest.mark.parametrize("name", ["auto", "torch"])
@pytest.mark.parametrize("how", ["swapped", "same", "smaller"])
def test_another_process_group_has_another_fabric(how: str, name: str, mode: str, tmp_path: Path) -> None:
    work = partial(regroup, how=how, name=name, mode=mode, folder=str(tmp_path))
    results = syncline.run(work, 3, "torch", Deadlines(20.0))
    expected = {"swapped": [(2, 3), (1, 3), (0, 3)], "same": [(0, 3), (1, 3), (2, 3)], "smaller": [(0, 2), (1, 2)]}
    found = [result for result in results if result is not None]
    assert [one["place"] for one in found] == expected[how]
    for one in found:
        assert one["from_first"]
        assert one["same"]
        assert "was rank" in one["refused"]
        assert "its process group was destroyed" in one["refused"]
        assert "before the process group was destroyed or another was made" in one["given"]


@pytest.mark.parametrize("mode", one_now_others_slow(["async", *MODES]))
def test_close_is_quiet_after_the_process_group_was_destroyed(mode: str) -> None:
    assert syncline.run(partial(close_after_destroying, mode=mode), 2, "torch", Deadlines(20.0)) == ["", ""]


def test_a_world_of_one_ends_when_there_is_a_process_group(tmp_path: Path) -> None:
    for refused, name, more in syncline.run(partial(join_a_group_later, folder=str(tmp_path)), 2, "torch"):
        assert "made for rank 0 of 1" in refused
        assert (name, more) == ("shm", 1)


@pytest.mark.parametrize("fabric", ["threads", "shm"])
def test_init_inside_run_is_the_fabric_of_run(fabric: str) -> None:
    for same, by_name, deadlines, other in syncline.run(asks_inside_run, 2, fabric, Deadlines(20.0)):
        assert same
        assert by_name
        assert "give it to run()" in deadlines
        assert "was asked for inside run()" in other
