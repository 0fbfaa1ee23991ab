"""Emulated hosts: they are made, limited and removed, ranks run on them, and one run has them at a time."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading

import pytest

from support.emulated_hosts import needs_hosts
from syncline.errors import ConfigError, SynclineError
from syncline.lab.hosts import OnHosts, hosts, locked_within
from syncline.lab.links import sent_by
from syncline.launch.processes import run_processes


@pytest.mark.needs_net
@pytest.mark.timeout(120)
def test_hosts_are_made_limited_and_removed():
    needs_hosts()
    with hosts(2, "100mbit") as made:
        told = made.run(
            [sys.executable, "-c", "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"], 29_500, 60
        )
        assert told.split() == ["0", "2"]
        with pytest.raises(SynclineError, match="no such thing"):
            made.run([sys.executable, "-c", "raise SystemExit('no such thing')"], 29_500, 60)
    assert "slhost" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def sent_here(fabric) -> tuple[int, int]:
    before = sent_by("eth0")
    fabric.barrier()
    return fabric.rank, sent_by("eth0") - before


def failing(fabric) -> None:
    raise SynclineError(f"rank {fabric.rank} is on a host that is broken")


@pytest.mark.needs_net
@pytest.mark.timeout(120)
def test_ranks_run_on_hosts_and_their_errors_come_back(monkeypatch):
    needs_hosts()
    with hosts(2, "1gbit"):
        monkeypatch.setattr("syncline.lab.hosts.PATIENCE_S", 0.0)
        with pytest.raises(ConfigError, match="in use by another run"), hosts(2, "1gbit"):
            pass
        assert all(0 < sent < 100_000 for _, sent in run_processes(sent_here, 2, OnHosts()))
        with pytest.raises(SynclineError, match="on a host that is broken"):
            run_processes(failing, 2, OnHosts())
    with pytest.raises(SynclineError, match="slhost0"):
        run_processes(sent_here, 2, OnHosts())


def test_a_lock_of_another_run_is_waited_for_so_long(tmp_path):
    with (tmp_path / "lock").open("w") as theirs, (tmp_path / "lock").open("w") as mine:
        assert locked_within(theirs, 0.0)
        assert not locked_within(mine, 0.2)
        threading.Timer(0.3, lambda: fcntl.flock(theirs, fcntl.LOCK_UN)).start()
        assert locked_within(mine, 20.0)
