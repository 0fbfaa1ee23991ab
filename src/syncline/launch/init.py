"""`init()`: join the ranks that torchrun, or the user's own script, has started."""

from __future__ import annotations

import atexit
import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.current import use_in_process
from syncline.errors import ConfigError, JoinFailed, OutOfSharedMemory, UnknownName
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.shm import MOST_RANKS, Meeting, ShmFabric, missing
from syncline.fabric.shm_doors import ShmDoors, ShmNewcomer
from syncline.fabric.threads import Threads
from syncline.fabric.torch import TorchFabric
from syncline.fabric.torch_doors import TorchDoors
from syncline.launch.torch import newcomer

if TYPE_CHECKING:
    from syncline.fabric.base import Fabric

log = logging.getLogger(__name__)
FABRICS = ("auto", "shm", "torch")
WHERE, TALK = "syncline/newcomers", "through this store"


def init(
    backend: str = "auto", fabric: str = "auto", deadlines: Deadlines | None = None, rejoin: bool = False
) -> Fabric:
    """Join the group and make its fabric the current one.

    A process group that exists already is used as it is. Otherwise, under torchrun, one is made: NCCL where there is
    CUDA, Gloo elsewhere, or `backend`. Outside torchrun it is a world of one, and everything still works.

    CPU ranks that all share a host talk through shared memory, and through the process group where that cannot be;
    `fabric="shm"` makes that an error, `fabric="torch"` does not try.

    `rejoin` is for a process that takes the place of one that died, in a job that was started by hand, with the same
    environment. Modes async and bounded take such newcomers. Under torchrun there are none: it starts all ranks again.
    """
    if fabric not in FABRICS:
        raise UnknownName("fabric", fabric, FABRICS)
    deadlines = deadlines or Deadlines()
    joined: Fabric
    if rejoin:
        joined = come_later(deadlines)
    elif dist.is_available() and dist.is_initialized():
        joined = TorchFabric(deadlines=deadlines)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        joined = join_torchrun(backend, deadlines)
    else:
        joined = Threads(deadlines=deadlines).group(1).fabric(0)
    if isinstance(joined, TorchFabric) and fabric != "torch":
        group = joined
        joined = share_memory(group, required=fabric == "shm")
        open_doors(joined, group)
    elif isinstance(joined, TorchFabric):
        open_doors(joined, joined)
    use_in_process(joined)
    atexit.register(joined.close, drain=False)
    return joined


def join_torchrun(backend: str, deadlines: Deadlines) -> TorchFabric:
    """Make the process group that the environment describes."""
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=timedelta(seconds=deadlines.join))
    return TorchFabric(deadlines=deadlines, owns_group=True)


def open_doors(fabric: Fabric, group: TorchFabric) -> None:
    """Newcomers are possible where ranks were started by hand; rank 0 says in the store where they knock."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    store = base_of(group.group.get_group_store())
    told = TALK
    if isinstance(fabric, ShmFabric):
        fabric.doors = ShmDoors(fabric.meeting, fabric.deadlines)
        told = fabric.meeting.nonce.hex()
    else:
        fabric.doors = TorchDoors(store, group.backend, fabric.deadlines)
    if fabric.rank == 0:
        store.set(WHERE, told)


def base_of(store: Store) -> Store:
    """The store itself, without the prefixes of groups, as a newcomer finds it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def come_later(deadlines: Deadlines) -> Fabric:
    """Find the job that the environment describes, in the place of a rank that died."""
    if dist.is_initialized() or not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            "rejoin=True needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as the process had that died, "
            "and no process group yet"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=deadlines.join))
        incarnation = store.add(f"{WHERE}/{rank}", 1)
        told = store.get(WHERE).decode()
    except RuntimeError as error:
        raise JoinFailed(f"there is no job at {address}:{port} that rank {rank} could rejoin: {error}") from error
    if told == TALK:
        return newcomer(rank, world, incarnation, TorchDoors(store, "gloo", deadlines))
    return ShmNewcomer(rank, world, incarnation, ShmDoors(Meeting(bytes.fromhex(told)), deadlines))


def share_memory(group: TorchFabric, required: bool = False) -> Fabric:
    """A shared-memory fabric over the ranks of a process group, or the group itself where there cannot be one.

    What each rank can do may differ, so every decision is made by all ranks together.
    """
    reason = why_not(group)
    if not anyone(group, bool(reason)):
        shared, reason = try_to_meet(group)
        if not anyone(group, shared is None) and shared is not None:
            return shared
        if shared is not None:
            shared.engine = None
            shared.close()
    reason = reason or "another rank cannot"
    if required:
        raise ConfigError(f'fabric="shm" is not possible here: {reason}; use fabric="auto" to fall back to torch')
    log.info("ranks talk through torch.distributed and not through shared memory: %s", reason)
    return group


def why_not(group: TorchFabric) -> str:
    """Why these ranks should not even try; empty if they should."""
    if group.device.type != "cpu":
        return f"tensors are on {group.device.type}"
    if len(group.hosts) > 1:
        return f"ranks are on {len(group.hosts)} hosts"
    if group.world > MOST_RANKS:
        return f"{group.world} ranks are more than {MOST_RANKS}"
    return missing()


def try_to_meet(group: TorchFabric) -> tuple[ShmFabric | None, str]:
    """Meet where rank 0 says. That the memory is really shared is proven by reading each other's headers."""
    nonce = torch.tensor(list(Meeting().nonce), dtype=torch.int32)
    group.broadcast(nonce)
    meeting = Meeting(bytes(nonce.tolist()))
    try:
        return ShmFabric(meeting, group.rank, group.world, group.deadlines, engine=group), ""
    except (JoinFailed, OutOfSharedMemory) as error:
        return None, str(error)


def anyone(group: TorchFabric, mine: bool) -> bool:
    """Whether it is true on any rank."""
    vote = torch.tensor([int(mine)], dtype=torch.int32, device=group.device)
    return bool(group.all_reduce(vote, op="max", collective="direct").item())
