"""How long something may take on a machine that also does other things. Light: ranks import it."""

from __future__ import annotations

import os


def within(seconds: float, most: float = float("inf")) -> float:
    """So many seconds where a process gets a core when it wants one; where several want the same one, as often that.

    A limit that is tight where the machine is free, and which others who use the machine do not break. A test that
    lets it pass says how long it can wait at the `most`.
    """
    return min(seconds * max(1.0, wanting() / len(os.sched_getaffinity(0))), most)


def wanting() -> float:
    """How many processes want a core: now, or in the last minute, whichever is more."""
    with open("/proc/loadavg") as file:
        last_minute, _, _, now, _ = file.read().split()
    return max(float(last_minute), float(now.partition("/")[0]))
