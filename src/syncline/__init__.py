"""Syncline keeps the replicas of a PyTorch model in step while they train.

model = Net(); optimizer = torch.optim.AdamW(model.parameters())
sync = syncline.Sync(model, optimizer)
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
print(sync.report())
"""

from __future__ import annotations

from syncline.batch_norm import convert_batch_norm
from syncline.current import current
from syncline.errors import SynclineError
from syncline.fabric.base import Fabric
from syncline.fabric.deadlines import Deadlines
from syncline.launch import init, run
from syncline.sync import Sync

__version__ = "0.1.0"
__all__ = [
    "Deadlines",
    "Fabric",
    "Sync",
    "SynclineError",
    "__version__",
    "convert_batch_norm",
    "current",
    "init",
    "run",
]
