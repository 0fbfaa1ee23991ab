"""Ranks as processes of this machine, joined by a torch.distributed process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

from syncline.fabric.base import Fabric
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.membership import ReplacementTransport
from syncline.fabric.torch import torch_fabric
from syncline.fabric.torch_membership import TorchMembership

if TYPE_CHECKING:
    from syncline.launch.processes import Join, Life


@dataclass(frozen=True)
class TorchProcesses:
    """How to set up local processes with a process group: give it to `run` as `fabric`."""

    backend: str = "gloo"
    deadlines: Deadlines = field(default_factory=Deadlines)

    def prepare(self, world: int) -> tuple[Join, Callable[[], None]]:
        """Ranks meet in a file of the starting process that has no name, so it outlives any rank and is gone after it.

        A store with an address asks the name service who connects to it, and waits for seconds where that is slow.
        """
        file = os.memfd_create("syncline-store")
        path = f"/proc/{os.getpid()}/fd/{file}"
        return JoinTorch(path, self.backend, self.deadlines), partial(os.close, file)


@dataclass(frozen=True)
class JoinTorch:
    """How one rank joins."""

    path: str
    backend: str
    deadlines: Deadlines

    def __call__(self, rank: int, world: int, life: Life) -> Fabric:
        """Meet the others through the store; local ranks talk over the loopback device."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        patience = timedelta(seconds=self.deadlines.join)
        store = FileStore(self.path)
        store.set_timeout(patience)
        membership = TorchMembership(lambda: store, self.backend, self.deadlines)
        if life.incarnation:
            return replacement(rank, world, life.incarnation, membership)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=world, timeout=patience)
        fabric = torch_fabric(deadlines=self.deadlines, owns_group=True)
        fabric.membership = membership if life.restarts else None
        return fabric


def replacement(rank: int, world: int, incarnation: int, membership: TorchMembership) -> Fabric:
    """Torch makes groups of two only where there is a world, so a replacement worker is one of its own."""
    dist.init_process_group(membership.backend, store=HashStore(), rank=0, world_size=1)
    transport = ReplacementTransport("torch", rank, world, incarnation, membership.deadlines)
    fabric = Fabric(transport, membership=membership)
    fabric.at_close.append(dist.destroy_process_group)
    return fabric
