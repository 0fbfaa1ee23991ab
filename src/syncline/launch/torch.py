"""Ranks as processes of this machine, joined by a torch.distributed process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from syncline.fabric.deadlines import Deadlines
from syncline.fabric.torch import TorchFabric
from syncline.fabric.torch_doors import TorchDoors, TorchNewcomer

if TYPE_CHECKING:
    from syncline.fabric.base import Fabric
    from syncline.launch.processes import Join, Life


@dataclass(frozen=True)
class TorchProcesses:
    """How to set up local processes with a process group: give it to `run` as `fabric`."""

    backend: str = "gloo"
    deadlines: Deadlines = field(default_factory=Deadlines)

    def prepare(self, world: int) -> tuple[Join, Callable[[], None]]:
        """The store is kept by the starting process, so it outlives any rank."""
        stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        return JoinTorch(stores[0].port, self.backend, self.deadlines), stores.clear


@dataclass(frozen=True)
class JoinTorch:
    """How one rank joins."""

    port: int
    backend: str
    deadlines: Deadlines

    def __call__(self, rank: int, world: int, life: Life) -> Fabric:
        """Meet the others through the store; local ranks talk over the loopback device."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        patience = timedelta(seconds=self.deadlines.join)
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=patience)
        doors = TorchDoors(store, self.backend, self.deadlines)
        if life.incarnation:
            return newcomer(rank, world, life.incarnation, doors)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=world, timeout=patience)
        fabric = TorchFabric(deadlines=self.deadlines, owns_group=True)
        fabric.doors = doors if life.restarts else None
        return fabric


def newcomer(rank: int, world: int, incarnation: int, doors: TorchDoors) -> TorchNewcomer:
    """Torch makes groups of two only where there is a world, so a newcomer is one of its own."""
    dist.init_process_group(doors.backend, store=HashStore(), rank=0, world_size=1)
    fabric = TorchNewcomer(rank, world, incarnation, doors)
    fabric.after.append(dist.destroy_process_group)
    return fabric
