"""Hearing of an abort while waiting for somebody else, through the process group's store.

A rank that aborts closes its connections, which wakes whoever waits for it. Others may have all that it had to send,
and wait for a third rank: they would not notice. Nor does Gloo always end what waits when a rank has died. So a thread
of each rank looks for aborts, of all groups that it has, while a call of one of them takes long: the store is one
process for all ranks, and is left alone in a healthy run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.errors import FabricClosed
from syncline.fabric.health import Kind

POLL_S = 0.03
LONG_S = 0.1  # a call that takes longer may be waiting for a rank that will never come


class AbortWatch:
    """One rank's, for a process group and all groups that were made from it."""

    def __init__(self, find_store: Callable[[], Store], rank: int) -> None:
        """The store is asked for and not kept: the user may destroy its group."""
        self.find_store = find_store
        self.rank = rank
        self.groups: dict[str, Callable[[Kind], None]] = {}  # by name: what to do when one is aborted, and why it is
        self.calls: dict[int, float] = {}  # under way, by their `id`: when they began
        self.heard = 0
        self.closing = threading.Event()
        self.thread: threading.Thread | None = None

    def call_begins(self, call: object) -> None:
        """A call waits for other ranks from now on."""
        self.calls[id(call)] = time.monotonic()

    def waits_since(self) -> float:
        """When the oldest call under way began; now if there is none."""
        return min([*self.calls.values()], default=time.monotonic())

    def call_ends(self, call: object) -> None:
        """A call waits no longer."""
        self.calls.pop(id(call), None)

    def add(self, group: str, aborted: Callable[[Kind], None]) -> None:
        """Listen for aborts of a group."""
        self.groups[group] = aborted
        if self.thread is None:
            self.thread = threading.Thread(target=self._watch, name=f"rank {self.rank} hears of aborts", daemon=True)
            self.thread.start()

    def remove(self, group: str) -> None:
        """Listen no more."""
        self.groups.pop(group, None)

    def tell(self, group: str, kind: Kind) -> None:
        """Let the others hear that this rank aborts a group, or has found out that a rank of it is lost or stalled."""
        store = self._store()
        store.set(f"abort {store.add('aborts', 1)}", json.dumps([self.rank, group, kind]))

    def close(self) -> None:
        """End the thread."""
        self.closing.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def _watch(self) -> None:
        with suppress(RuntimeError, FabricClosed):  # the store is gone: there is nothing to hear
            while not self.closing.wait(POLL_S):
                if not self._waits_long():
                    continue
                store, key = self._store(), f"abort {self.heard + 1}"
                if store.check([key]):
                    self.heard += 1
                    rank, group, kind = json.loads(store.get(key))
                    if rank != self.rank and group in self.groups:
                        threading.Thread(target=self.groups[group], args=(kind,), daemon=True).start()

    def _waits_long(self) -> bool:
        """Whether a call has been under way for long."""
        return time.monotonic() - self.waits_since() > LONG_S

    def _store(self) -> Store:
        return PrefixStore("syncline/aborts", self.find_store())
