"""Scripts of which every rank runs one, as torchrun starts them: a real interpreter each, which really ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

from support import TESTS


def run_script(folder: Path, script: str, world: int, *arguments: str) -> list[subprocess.CompletedProcess]:
    """What each rank said, and its exit code."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **shared, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(file), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **pipes) for rank in range(world)]
    return [ended(rank) for rank in ranks]


def ended(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """A process that takes far too long is killed."""
    try:
        said = process.communicate(timeout=90.0)
    except subprocess.TimeoutExpired:
        process.kill()
        said = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
