"""How far each rank is, in the process group's store, where the others find it even when that rank is stopped.

Progress is written to the store by a thread of its own, at most once a second and only when it has changed, so that
publishing it costs the rank nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.errors import FabricClosed
from syncline.fabric.health import NO_PROGRESS, RankProgress

EVERY_S = 1.0
READING_S = 2.0  # the store may be on the rank that is stopped


class ProgressStore:
    """One rank's end of it."""

    def __init__(self, find_store: Callable[[], Store], rank: int) -> None:
        """The store is asked for and not kept: the user may destroy its group."""
        self.find_store = find_store
        self.rank = rank
        self.own = NO_PROGRESS
        self.closing = threading.Event()
        self.thread: threading.Thread | None = None

    def publish(self, progress: RankProgress) -> None:
        """Remember it; the thread will find it."""
        self.own = progress
        if self.thread is None:
            name = f"rank {self.rank} publishes progress"
            self.thread = threading.Thread(target=self._write, name=name, daemon=True)
            self.thread.start()

    def read(self, rank: int) -> RankProgress:
        """The last progress of a rank that reached the store."""
        if rank == self.rank:
            return self.own
        found: list[RankProgress] = []
        asking = threading.Thread(target=self._ask, args=(rank, found), daemon=True)
        asking.start()
        asking.join(READING_S)
        return found[0] if found else NO_PROGRESS

    def close(self) -> None:
        """Let the thread write the last progress, and end."""
        self.closing.set()
        if self.thread is not None:
            self.thread.join(READING_S)

    def _store(self) -> Store:
        return PrefixStore("syncline/progress", self.find_store())

    def _ask(self, rank: int, found: list[RankProgress]) -> None:
        with suppress(RuntimeError, FabricClosed):
            store = self._store()
            if store.check([str(rank)]):
                found.append(RankProgress(*json.loads(store.get(str(rank)))))

    def _write(self) -> None:
        written = NO_PROGRESS
        is_last = False
        with suppress(RuntimeError, FabricClosed):  # the store is gone: nobody can read it
            while not is_last:
                is_last = self.closing.is_set()
                if (own := self.own) != written:
                    self._store().set(str(self.rank), json.dumps(own))
                    written = own
                self.closing.wait(EVERY_S)
