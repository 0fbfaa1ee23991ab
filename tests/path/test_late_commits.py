"""What codecs draw follows the number of good passes, also where one rank commits a pass later than another."""

from __future__ import annotations

import time
from functools import partial

import pytest
from torch import Tensor

import syncline
from support.references import same_bits
from support.trainees import Trainee
from syncline.path.coded import CodedPath
from syncline.path.coded_work import CodedPass

PAUSE_S = 0.05


@pytest.fixture
def late_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit on rank 1 a while after the status of a pass has come."""
    usual = CodedPath._commit_if_complete

    def late(path: CodedPath, current: CodedPass) -> None:
        if path.fabric.rank == 1 and current.status is not None and current.arrived == len(current.works):
            time.sleep(PAUSE_S)
        usual(path, current)

    monkeypatch.setattr(CodedPath, "_commit_if_complete", late)


def go_on_without_feedback(fabric: syncline.Fabric, mode: str) -> tuple[list[Tensor], list[int]]:
    """Places after every step with a codec that draws, after one with residuals; and the steps that it drew for."""
    trainee = Trainee(fabric, mode, codec="topk:0.3")
    trainee.train(3)
    trainee.sync.reconfigure(codec="randomk:0.3,scaled=true,feedback=false")
    places, counts = [], []
    for _ in range(6):
        if fabric.rank == 0:
            time.sleep(2 * PAUSE_S)  # so that its pass in flight is committed before the next one begins
        places.append(trainee.step())
    places.append(trainee.drained())
    counts.append(trainee.sync.state_dict()["layout"]["good_passes"])
    trainee.sync.close()
    return places, counts


@pytest.mark.parametrize("mode", ["sync", "delayed"])
@pytest.mark.usefixtures("late_commits")
def test_ranks_draw_alike_after_residuals_were_sent_though_one_commits_late(mode: str) -> None:
    first, second = syncline.run(partial(go_on_without_feedback, mode=mode), 2, "threads")
    assert all(map(same_bits, first[0], second[0]))
    assert first[1] == second[1] == [9]


def load_again(fabric: syncline.Fabric) -> Tensor:
    """A state that was saved when residuals had been sent, loaded by the run that saved it."""
    trainee = Trainee(fabric, "sync", codec="topk:0.3")
    trainee.train(2)
    trainee.sync.reconfigure(codec="fp16")
    trainee.train(2)
    trainee.sync.load_state_dict(trainee.sync.state_dict())
    place = trainee.train(2)[-1]
    trainee.sync.close()
    return place


def test_a_state_is_loaded_by_the_run_that_has_sent_its_residuals() -> None:
    first, second = syncline.run(load_again, 2, "threads")
    assert same_bits(first, second)


def save_with_a_fragment_under_way(fabric: syncline.Fabric) -> list[int]:
    trainee = Trainee(fabric, "diloco:every=4,fragments=2,delay=1", codec="randomk:0.3")
    trainee.train(5)
    counts = [trainee.sync.state_dict()["good_passes"] for _ in range(2)]
    trainee.sync.close()
    return counts


@pytest.mark.usefixtures("late_commits")
def test_a_fragment_under_way_counts_in_the_state_that_waits_for_it() -> None:
    first, second = syncline.run(save_with_a_fragment_under_way, 2, "threads")
    assert len({*first, *second}) == 1
