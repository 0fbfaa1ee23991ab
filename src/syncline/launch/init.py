"""`init()`: join the ranks that torchrun, or the user's own script, has started."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from syncline.core.torch_internals import live_groups
from syncline.current import current, latest, of_run, use_in_process
from syncline.errors import ConfigError, JoinFailed, OutOfSharedMemory, UnknownName
from syncline.fabric.base import Fabric
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.membership import ReplacementTransport
from syncline.fabric.process_groups import base_of
from syncline.fabric.shm import MOST_RANKS, Meeting, ShmTransport, missing
from syncline.fabric.shm_membership import ShmMembership
from syncline.fabric.threads import Threads, ThreadsTransport
from syncline.fabric.torch import TorchTransport, torch_fabric
from syncline.fabric.torch_membership import TorchMembership
from syncline.launch.torch import replacement

log = logging.getLogger(__name__)
FABRICS = ("auto", "shm", "torch")
WHERE, THROUGH_STORE = "syncline/rejoining", "through this store"


def init(
    backend: str = "auto", fabric: str = "auto", deadlines: Deadlines | None = None, rejoin: bool = False
) -> Fabric:
    """Join the group and make its fabric the current one.

    A process group that exists already is used as it is. Otherwise, under torchrun, one is made: NCCL where there is
    CUDA, Gloo elsewhere, or `backend`. Outside torchrun it is a world of one, and everything still works.

    CPU ranks that all share a host talk through shared memory, and through the process group where that cannot be;
    `fabric="shm"` makes that an error, `fabric="torch"` does not try. Inside `run` it is the fabric of `run`.

    `rejoin` is for a process that takes the place of one that died, in a job that was started by hand, with the same
    environment. Modes async and bounded let it rejoin. Under torchrun nobody can: it starts all ranks again.
    """
    if fabric not in FABRICS:
        raise UnknownName("fabric", fabric, FABRICS)
    inside = of_run()
    if inside is not None and not rejoin and (inside.name == "threads" or not dist.is_initialized()):
        return same_as_asked(inside, fabric, deadlines)
    deadlines = deadlines or Deadlines()
    if rejoin:
        joined = take_the_place(deadlines)
    elif dist.is_available() and dist.is_initialized():
        joined = torch_fabric(deadlines=deadlines)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        joined = join_torchrun(backend, deadlines)
    else:
        joined = Fabric(LoneTransport(Threads(deadlines=deadlines).group(1), 0))
    if isinstance(joined.transport, TorchTransport):
        group = joined
        if fabric != "torch":
            joined = share_memory(group, required=fabric == "shm")
        allow_rejoining(joined, group)
    use_in_process(joined)
    atexit.register(end_with_script, joined)
    return joined


def end_with_script(fabric: Fabric) -> None:
    """A script that has come to its end does what `close` does, also for the others; one that has failed just ends.

    In a forked child torch would wait for threads of its groups that are the parent's, so they are never let go of.
    """
    for group in [] if fabric.birthplace.is_here() else live_groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if not hasattr(sys, "last_value"):
        fabric.finish()
    fabric.close(drain=False)


def find(fabric: str) -> Fabric:
    """The current fabric where it is what was asked for, else the one that `init` makes."""
    found, before = current(), latest()
    if found is not None and (fabric in ("auto", found.name) or isinstance(found.transport, LoneTransport)):
        return found
    if fabric == "torch" and found is not None and found.engine is not None:
        return found.engine
    if found is None and before is not None and before.world > 1 and not dist.is_initialized():
        raise ConfigError(
            f"this process was rank {before.rank} of {before.world}, and its process group was destroyed or its fabric "
            f"closed; make another with dist.init_process_group(), or call syncline.init() to begin anew"
        )
    return init(fabric=fabric)


class LoneTransport(ThreadsTransport):
    """A world of one, outside torchrun, until there is a process group of more."""

    @property
    def outlived(self) -> bool:
        return dist.is_initialized() and dist.get_world_size() > 1


def same_as_asked(inside: Fabric, fabric: str, deadlines: Deadlines | None) -> Fabric:
    """The fabric of `run`, if that is what was asked for in it."""
    if fabric not in ("auto", inside.name):
        raise ConfigError(
            f'fabric="{fabric}" was asked for inside run(), whose ranks talk over {inside.name}; '
            f'say run(..., fabric="{fabric}"), or fabric="auto" here'
        )
    if deadlines not in (None, inside.deadlines):
        raise ConfigError(f"{deadlines} was given inside run(), which has {inside.deadlines}; give it to run()")
    return inside


def join_torchrun(backend: str, deadlines: Deadlines) -> Fabric:
    """Make the process group that the environment describes."""
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=timedelta(seconds=deadlines.join))
    return torch_fabric(deadlines=deadlines, owns_group=True)


def allow_rejoining(fabric: Fabric, group: Fabric) -> None:
    """Replacement workers are possible where ranks were started by hand; rank 0 says in the store how they rejoin."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    transport = group.transport
    assert isinstance(transport, TorchTransport)
    where = THROUGH_STORE
    if isinstance(fabric.transport, ShmTransport):
        meeting = fabric.transport.meeting
        fabric.membership = ShmMembership(meeting, fabric.deadlines)
        where = meeting.nonce.hex()
    else:
        fabric.membership = TorchMembership(
            lambda: base_of(transport.process_group.get_group_store()), transport.backend, fabric.deadlines
        )
    if fabric.rank == 0:
        base_of(transport.process_group.get_group_store()).set(WHERE, where)


def take_the_place(deadlines: Deadlines) -> Fabric:
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
        where = store.get(WHERE).decode()
    except RuntimeError as error:
        raise JoinFailed(f"there is no job at {address}:{port} that rank {rank} could rejoin: {error}") from error
    if where == THROUGH_STORE:
        return replacement(rank, world, incarnation, TorchMembership(lambda: store, "gloo", deadlines))
    transport = ReplacementTransport("shm", rank, world, incarnation, deadlines)
    return Fabric(transport, membership=ShmMembership(Meeting(bytes.fromhex(where)), deadlines))


def share_memory(group: Fabric, required: bool = False) -> Fabric:
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
        if isinstance(group.transport, TorchTransport):
            group.transport.owns_group = False  # whoever tries again finds the process group
        group.close(drain=False)
        raise ConfigError(f'fabric="shm" is not possible here: {reason}; use fabric="auto" to fall back to torch')
    log.info("ranks talk through torch.distributed and not through shared memory: %s", reason)
    return group


def why_not(group: Fabric) -> str:
    """Why these ranks should not even try; empty if they should."""
    if group.device.type != "cpu":
        return f"tensors are on {group.device.type}"
    if len(group.hosts) > 1:
        return f"ranks are on {len(group.hosts)} hosts"
    if group.world > MOST_RANKS:
        return f"{group.world} ranks are more than {MOST_RANKS}"
    return missing()


def try_to_meet(group: Fabric) -> tuple[Fabric | None, str]:
    """Meet where rank 0 says. That the memory is really shared is proven by reading each other's headers."""
    nonce = torch.tensor(list(Meeting().nonce), dtype=torch.int32)
    group.broadcast(nonce)
    meeting = Meeting(bytes(nonce.tolist()))
    try:
        transport = ShmTransport(meeting, group.rank, group.transport.group, group.deadlines)
        return Fabric(transport, engine=group), ""
    except (JoinFailed, OutOfSharedMemory) as error:
        return None, str(error)


def anyone(group: Fabric, mine: bool) -> bool:
    """Whether it is true on any rank."""
    vote = torch.tensor([int(mine)], dtype=torch.int32, device=group.device)
    return bool(group.all_reduce(vote, op="max", collective="direct").item())
