"""One rank of the network benchmark, on a host of its own: python -m syncline.bench.network_rank METHOD STEPS"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
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
    said: Callable[[], float]  # bytes in a step
    if method.startswith("ddp"):
        trained, said = with_ddp(model, method)
    else:
        sync = syncline.Sync(model, optimizer, codec=method.removeprefix("syncline "))
        said = lambda: sync.report().sent_bytes  # noqa: E731
    seconds, exposed, losses = [], [], []
    for step in range(WARM_UP + steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = next_byte_loss(trained, batches.of(step, fabric.rank))
        exposed.append(stopwatch.backward(loss))
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        losses.append(float(fabric.all_reduce(loss.detach(), op="mean")))
    if fabric.rank == 0:
        figures = {
            "step_s": median(seconds[WARM_UP:]),
            "exposed_s": median(exposed[WARM_UP:]),
            "said_bytes": said(),
            "loss": losses[-1],
        }
        print(json.dumps(figures))
    fabric.barrier()


def with_ddp(model: nn.Module, method: str) -> tuple[DistributedDataParallel, Callable[[], float]]:
    """PyTorch's own, with one of its hooks or none, and how many bytes it says in a step.

    Over Gloo the PowerSGD hook has all gradients in one bucket: it makes several calls for each, whose order with two
    buckets is not the same on all ranks, and then the ranks die.
    """
    nbytes = sum(p.nbytes for p in model.parameters())
    if method == "ddp powersgd":
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1000)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ddp, lambda: nbytes / state.compression_stats()[0]  # type: ignore[no-untyped-call]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if method == "ddp fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp, lambda: nbytes / 2 if method == "ddp fp16" else nbytes


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
