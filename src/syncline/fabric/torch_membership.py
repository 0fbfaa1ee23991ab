"""Rejoining through the store of a process group: an endpoint is a key, and a request the next of a row of keys.

The store has to outlive the rank that died: the one of `run` is kept by the starting process, else it is on rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.errors import JoinFailed
from syncline.fabric.base import Fabric
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.membership import Membership, RejoinAttempt, RejoinEndpoint, RejoinRequest
from syncline.fabric.process_groups import make_group
from syncline.fabric.torch import torch_fabric

OPEN, CLOSED = "open", "closed"


class TorchMembership(Membership):
    """Membership of the ranks of a process group, whose store is asked for when needed: users may destroy the group."""

    def __init__(self, find_store: Callable[[], Store], backend: str, deadlines: Deadlines) -> None:
        self.find_store = find_store
        self.backend = backend
        self.deadlines = deadlines

    @property
    def store(self) -> Store:
        """The part of the store that is about rejoining."""
        return PrefixStore("syncline/rejoin", self.find_store())

    def endpoint(self, place: str) -> TorchEndpoint:
        return TorchEndpoint(self, place)

    def attempt(self, place: str, request: RejoinRequest) -> TorchAttempt:
        return TorchAttempt(self.store, place, request)

    def pair(self, place: str, request: RejoinRequest, rank: int) -> Fabric:
        """Both sides connect under a name that only they use, and only once."""
        own = dist.get_rank()
        members = [own + 1, own] if rank else [own, own + 1]  # torch wants to find this process among them
        deadlines = self.meeting_deadlines()
        name = f"{request.rank} {request.incarnation} at {place}"
        group = make_group(self.store, name, members, rank, self.backend, timedelta(seconds=deadlines.join))
        try:
            return torch_fabric(group, deadlines, owns_group=True)
        except BaseException:
            dist.destroy_process_group(group)
            raise


class TorchEndpoint(RejoinEndpoint):
    """The keys of one rank."""

    def __init__(self, membership: TorchMembership, place: str) -> None:
        self.membership = membership
        self.place = place
        self.store = membership.store
        self.requests = 0  # that were heard
        with asking():
            self.store.set(f"{place}/endpoint", OPEN)

    def poll(self) -> RejoinRequest | None:
        key = f"{self.place}/request {self.requests + 1}"
        with asking():
            if not self.store.check([key]):
                return None
            self.requests += 1
            return RejoinRequest(*json.loads(self.store.get(key)))

    def accept(self, request: RejoinRequest) -> Fabric:
        with asking():
            self.store.set(f"{self.place}/answer to {request}", OPEN)
        return self.membership.pair(self.place, request, 0)

    def close(self) -> None:
        with suppress(RuntimeError):  # the store is gone: nobody can read it
            self.store.set(f"{self.place}/endpoint", CLOSED)


class TorchAttempt(RejoinAttempt):
    """A replacement worker's side of the keys."""

    def __init__(self, store: Store, place: str, request: RejoinRequest) -> None:
        self.store = store
        self.place = place
        self.request = request

    def can_ask(self) -> bool:
        key = f"{self.place}/endpoint"
        with asking():
            return bool(self.store.check([key])) and self.store.get(key) == OPEN.encode()

    def ask(self) -> None:
        with asking():
            number = self.store.add(f"{self.place}/requests", 1)
            self.store.set(f"{self.place}/request {number}", json.dumps(self.request))

    def is_accepted(self) -> bool:
        with asking():
            return bool(self.store.check([f"{self.place}/answer to {self.request}"]))


@contextmanager
def asking() -> Iterator[None]:
    """The store may be gone with the rank that keeps it."""
    try:
        yield
    except RuntimeError as error:
        raise JoinFailed(f"the store of the process group does not answer: {error}") from error
