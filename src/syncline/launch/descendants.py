"""The processes that a rank has started, such as the workers of a DataLoader: they end with it."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def kill_all(pids: list[int]) -> None:
    """Kill processes, of which some may have ended."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def descendants_of(pid: int | None) -> list[int]:
    """All processes that a process has started, and theirs. Those whose parent has ended are not found."""
    children: dict[int, list[int]] = defaultdict(list)
    for child, parent in parents():
        children[parent].append(child)
    found = [*children[pid or 0]]
    for one in found:
        found += children[one]
    return found


def parents() -> Iterator[tuple[int, int]]:
    """Every process of this machine that can be seen, with its parent."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
