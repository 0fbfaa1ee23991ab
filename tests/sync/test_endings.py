"""How training ends: exceptions, Ctrl-C, and `close`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import syncline
from support import TESTS, faulty, guarded
from support.catalogue import FABRICS, PROCESS_FABRICS
from support.guarded import Net, batch
from support.processes import in_session, session_ends
from support.replicas import VICTIM, WORLD, same
from syncline import Deadlines
from syncline.errors import FabricClosed, PeerAborted, PeerLost, RankFailed
from syncline.fabric.base import Fabric


@pytest.mark.parametrize("fabric", FABRICS)
def test_an_exception_in_one_backward_pass_ends_every_rank(fabric: str) -> None:
    work = partial(faulty.fail_in_backward, rank=VICTIM, error=ValueError)
    with pytest.raises(RankFailed, match="rank 1 failed first") as caught:
        syncline.run(work, WORLD, fabric, Deadlines(20.0))
    errors = caught.value.failures
    assert isinstance(errors.pop(VICTIM), ValueError)
    assert sorted(errors) == [0, 2]
    assert {type(error) for error in errors.values()} <= {PeerLost, PeerAborted}
    assert {error.rank for error in errors.values()} == {VICTIM}


def test_an_interrupted_thread_ends_every_rank() -> None:
    work = partial(faulty.fail_in_backward, rank=VICTIM, error=KeyboardInterrupt)
    with pytest.raises(RankFailed, match="rank 1 failed first") as caught:
        syncline.run(work, WORLD, "threads", Deadlines(20.0))
    assert isinstance(caught.value.failures[VICTIM], KeyboardInterrupt)


SCRIPT = """
    import signal
    import sys
    from functools import partial
    from support import faulty
    import syncline

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born deaf to it
        folder, fabric = sys.argv[1:]
        work = partial(faulty.train_until_interrupted, folder=folder)
        syncline.run(work, ranks=3, fabric=fabric, deadlines=syncline.Deadlines(40.0))
"""


def start_training(folder: Path, fabric: str) -> subprocess.Popen:
    """Three ranks that train for ever, in a session of their own, when all of them have made some steps."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    (folder / "ranks").mkdir()
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    arguments = [sys.executable, str(script), str(folder / "ranks"), fabric]
    child = subprocess.Popen(arguments, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 40.0
    while len(os.listdir(folder / "ranks")) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(os.listdir(folder / "ranks")) == 3
    return child


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_ctrl_c_ends_a_training_and_leaves_nothing_behind(tmp_path: Path, fabric: str) -> None:
    with start_training(tmp_path, fabric) as child:
        os.killpg(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=30.0)
    assert child.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert session_ends(child.pid, within_s=5.0), in_session(child.pid)


@pytest.mark.parametrize("fabric", FABRICS)
def test_after_close_every_rank_trains_alone(fabric: str) -> None:
    ranks = syncline.run(faulty.train_and_go_on_alone, 2, fabric, Deadlines(20.0))
    (zero, alone_zero, hooks), (one, alone_one, _) = ranks
    assert [same(mine, theirs) for mine, theirs in zip(zero, one, strict=True)] == [True, True, False, False]
    assert same(zero[-1], alone_zero)
    assert same(one[-1], alone_one)
    assert hooks == 0


def test_closing_the_fabric_closes_what_was_made_on_it() -> None:
    def work(fabric: Fabric) -> str:
        model = guarded.filled(Net())
        sync = syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=fabric)
        fabric.close()
        with pytest.raises(FabricClosed) as caught:
            model(batch(fabric.rank, 1)).sum().backward()
        sync.close()
        return str(caught.value)

    assert all("closed" in message for message in syncline.run(work, 2, "threads", Deadlines(5.0)))
