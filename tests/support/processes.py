"""Looks at the processes of this machine through /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from support.patience import within

OF_MPI = ("vader_segment", "mpich_", "psm")  # files that an MPI makes for its own ranks
HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    state: str
    command: str


def shared_memory_files() -> set[str]:
    """Names in /dev/shm, apart from those of an MPI, which may run beside."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OF_MPI)}


def process_table() -> Iterator[Process]:
    """Every process that can be seen, apart from those that end meanwhile."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                yield process_at(folder)


def process_at(folder: Path) -> Process:
    """The name in /proc/PID/stat may hold anything, so fields are counted from its closing bracket."""
    state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return Process(int(folder.name), int(parent), int(session), state, command)


def ranks_left() -> list[Process]:
    """What this process has started and not ended, apart from the helpers of multiprocessing, which stay."""
    mine = list(children_of(os.getpid()))
    helpers = [process for process in mine if any(name in process.command for name in HELPERS)]
    strangers = [process for process in mine if process not in helpers]
    return strangers + [process for helper in helpers for process in children_of(helper.pid)]


def children_of(pid: int) -> Iterator[Process]:
    """What a process has started, by any of its threads."""
    for child in numbers_of_children(pid):
        with suppress(OSError):  # it has ended meanwhile
            yield process_at(Path("/proc") / child)


def numbers_of_children(pid: int) -> list[str]:
    """As text, of all threads that have not ended meanwhile."""
    found: list[str] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += (thread / "children").read_text().split()
    return found


def in_session(session: int) -> list[Process]:
    """The processes of a session, apart from those that have ended and wait to be noticed."""
    return [process for process in process_table() if process.session == session and process.state != "Z"]


def session_ends(session: int, within_s: float) -> bool:
    """Whether all processes of a session are gone in time, or in a busy machine's time."""
    until = time.monotonic() + within(within_s)
    while in_session(session) and time.monotonic() < until:
        time.sleep(0.02)
    return not in_session(session)
