"""Syncline keeps the replicas of a PyTorch model in step while they train.

This package so far: fabrics (how bytes move), collectives (who sends what to whom, as data) and two ways to start.

    import syncline, torch

    def work(fabric):
        x = torch.full((1000,), float(fabric.rank))
        return fabric.all_reduce(x, op="mean", collective="ring")

    syncline.run(work, ranks=4, fabric="threads")
"""

from __future__ import annotations

from syncline.current import current
from syncline.errors import SynclineError
from syncline.fabric.base import Fabric
from syncline.fabric.deadlines import Deadlines
from syncline.launch import init, run

__version__ = "0.1.0"
__all__ = ["Deadlines", "Fabric", "SynclineError", "__version__", "current", "init", "run"]
