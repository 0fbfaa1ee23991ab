"""Ranks of a script, one of which keeps the store in which they find out who is to blame."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.scripts import run_script

SCRIPT = """
    import os
    import signal
    import sys
    import time
    import torch
    import syncline
    from syncline.errors import PeerError

    victim, first, seconds = sys.argv[1:]
    fabric = syncline.init(fabric="torch", deadlines=syncline.Deadlines(8.0, join=60.0))
    fabric.barrier()
    if fabric.rank == int(victim):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if fabric.rank == int(first):
            fabric.receive(torch.ones(1), int(victim)).wait()
        time.sleep(float(seconds))
        fabric.receive(torch.ones(1), int(first)).wait()
    except PeerError as error:
        print(type(error).__name__, error.rank, flush=True)
"""


@pytest.mark.timeout(120)
def test_when_the_store_is_silent_the_rank_that_keeps_it_is_to_blame(tmp_path: Path) -> None:
    """Rank 2 waits for rank 1 alone, which ends because rank 0 was killed."""
    killed, first, second = run_script(tmp_path, SCRIPT, 3, "0", "1", "0")
    assert killed.returncode == -9
    assert (first.stdout, second.stdout) == ("PeerLost 0\n", "PeerLost 0\n"), second.stderr


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_the_rank_that_keeps_the_store_does_not_end_before_others_have_reported(tmp_path: Path) -> None:
    """Rank 1 waits for rank 0 alone, which has noticed that rank 2 was killed two seconds before."""
    first, late, killed = run_script(tmp_path, SCRIPT, 3, "2", "0", "2")
    assert killed.returncode == -9
    assert (first.stdout, late.stdout) == ("PeerLost 2\n", "PeerLost 2\n"), late.stderr
