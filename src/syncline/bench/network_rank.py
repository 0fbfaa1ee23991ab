"""One rank of the network benchmark, on a host of its own: python -m syncline.bench.network_rank METHOD STEPS"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.bench.side_by_side import Stopwatch
from syncline.workloads.gpt import SHAPES, make_gpt, next_byte_loss
from syncline.workloads.text import Batches, standard_library

WARM_UP = 3  # steps that are not counted; DDP makes new buckets after its first


def main(method: str, steps: int) -> None:
    """Train, and let rank 0 print what it saw."""
    torch.set_num_threads(1)
    fabric = syncline.init(fabric="torch")
    shape = SHAPES["5M"]
    batches = Batches(standard_library(), shape.context, 1)
    model = make_gpt(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    stopwatch = Stopwatch(model)
    trained: nn.Module = model
    sync = None
    if method.startswith("ddp"):
        trained = with_ddp(model, method)
    else:
        sync = syncline.Sync(model, optimizer, codec=method.removeprefix("syncline "))
    seconds, exposed, losses = [], [], []
    for step in range(WARM_UP + steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = next_byte_loss(trained, batches.of(step, fabric.rank))
        exposed.append(stopwatch.backward(loss))
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        losses.append(float(fabric.all_reduce(loss.detach(), op="mean")))
    nbytes = sum(p.nbytes for p in model.parameters())
    if fabric.rank == 0:
        figures = {
            "step_s": median(seconds[WARM_UP:]),
            "exposed_s": median(exposed[WARM_UP:]),
            "said_bytes": sync.report().sent_bytes if sync else nbytes,
            "loss": losses[-1],
        }
        print(json.dumps(figures))
    fabric.barrier()


def with_ddp(model: nn.Module, method: str) -> DistributedDataParallel:
    """PyTorch's own, with one of its hooks or none."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if method == "ddp fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == "ddp powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
