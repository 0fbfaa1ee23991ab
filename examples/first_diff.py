"""The one-line change to a plain loop.

python examples/first_diff.py                          one process: the line costs nothing
torchrun --nproc-per-node 4 examples/first_diff.py     four processes of this machine, in step
"""

import torch
from torch import nn

import syncline

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sync = syncline.Sync(model, optimizer)  # <- this line

fabric = syncline.current()
rank = fabric.rank if fabric else 0
torch.manual_seed(rank)  # every rank has data of its own
truth = torch.linspace(-1, 1, 20)
for _step in range(200):
    x = torch.randn(32, 20)
    loss = nn.functional.mse_loss(model(x).squeeze(1), x @ truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.4f}")
    print(sync.report())
