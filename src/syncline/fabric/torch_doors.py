"""Newcomers through the store of a process group: a door is a key, and a knock the next of a row of keys.

The store has to outlive the rank that died: the one of `run` is kept by the starting process, else it is on rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.errors import JoinFailed
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.newcomers import Door, Doors, Doorstep, Knock, Newcomer
from syncline.fabric.torch import TorchFabric, make_group

OPEN, CLOSED = "open", "closed"


class TorchNewcomer(Newcomer):
    """A rank that comes later to a process group. Its own is a world of one, which torch needs to make others."""

    name: ClassVar[str] = "torch"


class TorchDoors(Doors):
    """Of the ranks of a process group, whose store is asked for when it is needed: the user may destroy the group."""

    def __init__(self, find_store: Callable[[], Store], backend: str, deadlines: Deadlines) -> None:
        self.find_store = find_store
        self.backend = backend
        self.deadlines = deadlines

    @property
    def store(self) -> Store:
        """The part of the store that is about newcomers."""
        return PrefixStore("syncline/doors", self.find_store())

    def open(self, place: str) -> TorchDoor:
        return TorchDoor(self, place)

    def before(self, place: str, knock: Knock) -> TorchDoorstep:
        return TorchDoorstep(self.store, place, knock)

    def pair(self, place: str, knock: Knock, rank: int) -> TorchFabric:
        """Both sides meet under a name that only they use, and only once."""
        own = dist.get_rank()
        members = [own + 1, own] if rank else [own, own + 1]  # torch wants to find this process among them
        deadlines = self.greeting()
        name = f"{knock.rank} {knock.incarnation} at {place}"
        group = make_group(self.store, name, members, rank, self.backend, timedelta(seconds=deadlines.join))
        try:
            return TorchFabric(group, deadlines, owns_group=True)
        except BaseException:
            dist.destroy_process_group(group)
            raise


class TorchDoor(Door):
    """One rank's."""

    def __init__(self, doors: TorchDoors, place: str) -> None:
        self.doors = doors
        self.place = place
        self.store = doors.store
        self.heard = 0  # knocks
        with asking():
            self.store.set(f"{place}/door", OPEN)

    def look(self) -> Knock | None:
        key = f"{self.place}/knock {self.heard + 1}"
        with asking():
            if not self.store.check([key]):
                return None
            self.heard += 1
            return Knock(*json.loads(self.store.get(key)))

    def let_in(self, knock: Knock) -> TorchFabric:
        with asking():
            self.store.set(f"{self.place}/answer to {knock}", OPEN)
        return self.doors.pair(self.place, knock, 0)

    def close(self) -> None:
        with suppress(RuntimeError):  # the store is gone: there is nobody to tell
            self.store.set(f"{self.place}/door", CLOSED)


class TorchDoorstep(Doorstep):
    """A newcomer's side."""

    def __init__(self, store: Store, place: str, knock: Knock) -> None:
        self.store = store
        self.place = place
        self.message = knock

    def is_there(self) -> bool:
        key = f"{self.place}/door"
        with asking():
            return bool(self.store.check([key])) and self.store.get(key) == OPEN.encode()

    def knock(self) -> None:
        with asking():
            number = self.store.add(f"{self.place}/knocks", 1)
            self.store.set(f"{self.place}/knock {number}", json.dumps(self.message))

    def is_open(self) -> bool:
        with asking():
            return bool(self.store.check([f"{self.place}/answer to {self.message}"]))


@contextmanager
def asking() -> Iterator[None]:
    """The store may be gone with the rank that keeps it."""
    try:
        yield
    except RuntimeError as error:
        raise JoinFailed(f"the store of the process group does not answer: {error}") from error
