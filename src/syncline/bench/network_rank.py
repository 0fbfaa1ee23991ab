"""One rank of the network benchmark, on a host of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.lab.hosts import DEVICE
from syncline.lab.links import sent_by
from syncline.bench.side_by_side import Stopwatch
from syncline.fabric.base import Fabric
from syncline.sync import Sync
from syncline.workloads.gpt import SHAPES, make_gpt, next_byte_loss
from syncline.workloads.text import Batches, standard_library

HOOKS = ("ddp", "ddp fp16", "ddp powersgd")
WARM_UP = 3  # steps that are not counted; DDP makes new buckets after its first

Said = Callable[[], float]  # bytes in a step


@dataclass(frozen=True)
class Figures:
    """What one rank saw of a method."""

    step_s: float  # the median
    exposed_s: float  # the median of what `backward()` takes after the last gradient
    said_bytes: float  # in a step: gradients, or what is said instead of them
    sent_bytes: float  # in a step: all that its network device sent, headers and the forwarding for others included
    loss: float  # after all steps, the mean over ranks

    @property
    def steps_per_s(self) -> float:
        """Of the median step."""
        return 1 / self.step_s


def train(fabric: Fabric, method: str, steps: int, size: str) -> Figures:
    """On one rank."""
    torch.set_num_threads(1)
    shape = SHAPES[size]
    batches = Batches(standard_library(), shape.context, 1)
    model = make_gpt(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    stopwatch = Stopwatch(model)
    trained, said = with_method(model, optimizer, method)
    seconds, exposed, loss = [], [], torch.zeros(())
    sent_before = 0
    for step in range(-WARM_UP, steps):
        fabric.barrier()  # by then all that was to be sent is sent
        if step == 0:
            sent_before = sent_by(DEVICE)
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = next_byte_loss(trained, batches.of(WARM_UP + step, fabric.rank))
        exposed.append(stopwatch.backward(loss))
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    fabric.barrier()
    sent = (sent_by(DEVICE) - sent_before) / steps
    mean_loss = float(fabric.all_reduce(loss.detach(), op="mean"))
    return Figures(median(seconds[WARM_UP:]), median(exposed[WARM_UP:]), said(), sent, mean_loss)


def with_method(model: nn.Module, optimizer: Optimizer, method: str) -> tuple[nn.Module, Said]:
    """What to train, and how many bytes it says in a step."""
    if method in HOOKS:
        return with_ddp(model, method)
    sync = Sync(model, optimizer, codec=method.removeprefix("syncline "))
    return model, lambda: sync.report().sent_bytes


def with_ddp(model: nn.Module, method: str) -> tuple[DistributedDataParallel, Said]:
    """PyTorch's own, with one of its hooks or none.

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
