"""How much a network device sends, window by window: read from its counter while a program runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from syncline.errors import SynclineError

LOOK_S = 0.02  # between two looks

Sample = tuple[float, int]  # seconds, and bytes sent since the device was made


def sent_by(device: str) -> int:
    """Bytes since the device was made, headers included; of this process's network namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])
    raise SynclineError(f"there is no network device {device!r} here; `ip link` lists those that are")


class LinkWatch:
    """Looks at a device until it is told to stop."""

    def __init__(self, device: str = "eth0") -> None:
        self.device = device
        self.samples: list[Sample] = [self.look()]
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="link watch", daemon=True)
        self.thread.start()

    def look(self) -> Sample:
        """Now."""
        return time.perf_counter(), sent_by(self.device)

    def watch(self) -> None:
        """In a thread."""
        while not self.stopping.wait(LOOK_S):
            self.samples.append(self.look())

    def stop(self) -> list[Sample]:
        """What was seen."""
        self.stopping.set()
        self.thread.join()
        self.samples.append(self.look())
        return self.samples


def peak_bytes_per_s(samples: Sequence[Sample], window_s: float) -> float:
    """The most that was sent in any window: of two looks that are at least so far apart, the closest."""
    peak, start = 0.0, 0
    for end, (now, sent) in enumerate(samples):
        while start + 1 < end and now - samples[start + 1][0] >= window_s:
            start += 1
        before, sent_before = samples[start]
        if now - before >= window_s:
            peak = max(peak, (sent - sent_before) / (now - before))
    return peak
