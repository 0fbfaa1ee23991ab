"""`init()`: join the ranks that torchrun, or the user's own script, has started."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from syncline.current import use_in_process
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.threads import Threads
from syncline.fabric.torch import TorchFabric

if TYPE_CHECKING:
    from syncline.fabric.base import Fabric


def init(backend: str = "auto", deadlines: Deadlines | None = None) -> Fabric:
    """Join the group and make its fabric the current one.

    A process group that exists already is used as it is. Otherwise, under torchrun, one is made: NCCL where there is
    CUDA, Gloo elsewhere, or `backend`. Outside torchrun it is a world of one, and everything still works.
    """
    deadlines = deadlines or Deadlines()
    fabric: Fabric
    if dist.is_available() and dist.is_initialized():
        fabric = TorchFabric(deadlines=deadlines)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        fabric = join_torchrun(backend, deadlines)
    else:
        fabric = Threads(deadlines=deadlines).group(1).fabric(0)
    use_in_process(fabric)
    return fabric


def join_torchrun(backend: str, deadlines: Deadlines) -> TorchFabric:
    """Make the process group that the environment describes."""
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=timedelta(seconds=deadlines.join))
    return TorchFabric(deadlines=deadlines, owns_group=True)
