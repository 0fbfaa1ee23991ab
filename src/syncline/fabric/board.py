"""What each rank says of itself, in the process group's store, where the others find it even when it is stopped.

A note is written to the store by a thread of its own, at most once a second and only when it has changed, so that
writing one costs the rank nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.errors import FabricClosed
from syncline.fabric.base import NO_NOTE, Note

EVERY_S = 1.0
READING_S = 2.0  # the store may be on the rank that is stopped


class Board:
    """One rank's end of it."""

    def __init__(self, find_group: Callable[[], dist.ProcessGroup], rank: int) -> None:
        self.find_group = find_group
        self.rank = rank
        self.note = NO_NOTE
        self.closing = threading.Event()
        self.thread: threading.Thread | None = None

    def write(self, note: Note) -> None:
        """Remember it; the thread will find it."""
        self.note = note
        if self.thread is None:
            self.thread = threading.Thread(target=self._publish, name=f"rank {self.rank} writes notes", daemon=True)
            self.thread.start()

    def read(self, rank: int) -> Note:
        """The last note of a rank that reached the store."""
        if rank == self.rank:
            return self.note
        found: list[Note] = []
        asking = threading.Thread(target=self._ask, args=(rank, found), daemon=True)
        asking.start()
        asking.join(READING_S)
        return found[0] if found else NO_NOTE

    def close(self) -> None:
        """Let the thread write the last note, and end."""
        self.closing.set()
        if self.thread is not None:
            self.thread.join(READING_S)

    def _store(self) -> Store:
        """The store of the group, which is not kept: the user may destroy it."""
        return PrefixStore("syncline/board", self.find_group().get_group_store())

    def _ask(self, rank: int, found: list[Note]) -> None:
        with suppress(RuntimeError, FabricClosed):
            store = self._store()
            if store.check([str(rank)]):
                first, second, third, fourth = json.loads(store.get(str(rank)))
                found.append((first, second, third, fourth))

    def _publish(self) -> None:
        written = NO_NOTE
        is_last = False
        with suppress(RuntimeError, FabricClosed):  # the store is gone: there is nobody to tell
            while not is_last:
                is_last = self.closing.is_set()
                if (note := self.note) != written:
                    self._store().set(str(self.rank), json.dumps(note))
                    written = note
                self.closing.wait(EVERY_S)
