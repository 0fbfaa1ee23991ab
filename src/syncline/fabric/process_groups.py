"""Process groups of torch.distributed: making one of some ranks, its store, and ending its connections."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.core.torch_internals import live_groups, new_group
from syncline.errors import JoinFailed

NEVER_SENT = 1  # a tag that no message has
MEET_S = 5.0  # for the others to be connected as well; whoever is not by then is found out by the first call


def make_group(
    store: Store, name: str, members: list[int], rank: int, backend: str, patience: timedelta
) -> dist.ProcessGroup:
    """A group under a name; `members` are ranks of the world, this process the one at `rank` of them."""
    try:
        group = new_group(store, name, members, rank, backend, patience)
    except RuntimeError as error:
        raise JoinFailed(f"{name}: not all have come within {patience.total_seconds()} s: {error}") from error
    meet(store, name, len(members))
    return group


def meet(store: Store, name: str, members: int) -> None:
    """Wait until all members of a new group have connected to each other.

    One that is there already may close the group at once, and Gloo takes that for a loss where it still connects.
    """
    connected = f"{name} is connected"
    with suppress(RuntimeError):  # a store that is gone, or a member: both are found out by the first call
        if store.add(connected, 1) == members:
            store.set(f"{connected} everywhere", "")
        store.wait([f"{connected} everywhere"], timedelta(seconds=MEET_S))


def close_connections(group: dist.ProcessGroup) -> None:
    """Wake whoever waits for this rank in a group, and end what it has under way itself.

    Gloo cannot be told to abort, but it closes all connections of a group when one wait times out: so one does.
    """
    with suppress(RuntimeError, NotImplementedError):
        group.abort()
    for peer in (rank for rank in range(group.size()) if rank != group.rank()):
        with suppress(RuntimeError):  # from one that is gone it fails without waiting, so all are tried
            nothing = torch.empty(1, dtype=torch.uint8)
            group.recv([nothing], peer, NEVER_SENT).wait(timedelta(milliseconds=1))


def keeper_of_store(group: dist.ProcessGroup) -> int | None:
    """The rank of a group whose process keeps its store; None if none of its ranks does."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or dist.group.WORLD is None:
        return None
    is_kept = isinstance(base_of(dist.group.WORLD.get_group_store()), TCPStore)
    ranks = dist.get_process_group_ranks(group)
    return ranks.index(0) if is_kept and 0 in ranks else None


def base_of(store: Store) -> Store:
    """The store itself, without the prefixes of groups."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def exists(group: dist.ProcessGroup | None) -> bool:
    """Whether nobody has destroyed it."""
    return group in live_groups()
