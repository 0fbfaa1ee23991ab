"""The same training with DDP over Gloo and with Syncline: same seed, same batches, same number of steps.

Exposed communication is measured alike for both: from the moment the last gradient of a backward pass is there to the
moment `backward()` returns.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncline.errors import SynclineError
from syncline.fabric.base import Fabric
from syncline.launch import run
from syncline.sync import Sync
from syncline.workloads.gpt import SHAPES, make_gpt, next_byte_loss
from syncline.workloads.text import Batches, standard_library

METHODS = {"ddp": "PyTorch DDP over Gloo", "syncline": "Syncline"}
WARM_UP = 2  # steps that are not counted
MOST_DIFFERENCE = 1e-3  # of the losses of both


@dataclass(frozen=True)
class Request:
    """What to train."""

    workers: int
    steps: int
    size: str
    batch: int
    codec: str
    collective: str
    accumulate: int


@dataclass(frozen=True)
class Record:
    """What rank 0 saw of one training."""

    losses: list[float]  # the mean over ranks, step by step
    step_s: list[float]
    exposed_s: list[float]
    nbytes: int
    sent_bytes: int

    @property
    def median_step_s(self) -> float:
        """Without the first steps."""
        return median(self.step_s[WARM_UP:])

    @property
    def median_exposed_s(self) -> float:
        """Without the first steps."""
        return median(self.exposed_s[WARM_UP:])

    @property
    def exposed_share(self) -> float:
        """Of the step."""
        return self.median_exposed_s / self.median_step_s

    def as_data(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"median_step_s": self.median_step_s, "median_exposed_s": self.median_exposed_s}


def train_side_by_side(request: Request) -> dict[str, Record]:
    """First DDP, then ours; an error if they learn different things."""
    records = {}
    for method in METHODS:
        fabric = "torch" if method == "ddp" else "auto"
        records[method] = run(partial(train, method=method, request=request), ranks=request.workers, fabric=fabric)[0]
    ddp, ours = (records[method].losses[-1] for method in METHODS)
    if request.codec == "none" and abs(ddp - ours) > MOST_DIFFERENCE * abs(ddp):
        raise SynclineError(f"the final losses differ: DDP {ddp}, Syncline {ours}; please report this")
    return records


def train(fabric: Fabric, method: str, request: Request) -> Record:
    """On one rank."""
    shape = SHAPES[request.size]
    batches = Batches(standard_library(), shape.context, request.batch)
    model = make_gpt(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    stopwatch = Stopwatch(model)
    trained: nn.Module = model
    sync: Sync | None = None
    if method == "ddp":
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        sync = Sync(model, optimizer, codec=request.codec, collective=request.collective, accumulate=request.accumulate)
    nbytes = sum(p.nbytes for p in model.parameters())
    record = Record([], [], [], nbytes, nbytes)
    with progress_of(fabric.rank, METHODS[method]) as progress:
        task = progress.add_task(METHODS[method], total=request.steps, loss="", speed="")
        for step in range(request.steps):
            started = time.perf_counter()
            optimizer.zero_grad()
            exposed = 0.0
            for part in range(request.accumulate):
                text = batches.of(step * request.accumulate + part, fabric.rank)
                with accumulating(trained, part + 1 < request.accumulate):
                    loss = next_byte_loss(trained, text) / request.accumulate
                    exposed += stopwatch.backward(loss)
            optimizer.step()
            record.step_s.append(time.perf_counter() - started)
            record.exposed_s.append(exposed)
            record.losses.append(float(fabric.all_reduce(loss.detach() * request.accumulate, op="mean")))
            share = 100 * sum(record.exposed_s) / sum(record.step_s)
            speed = f"{1 / record.step_s[-1]:.2f} steps/s, {share:.0f} % exposed"
            progress.update(task, advance=1, loss=f"loss {record.losses[-1]:.3f}", speed=speed)
    return record if sync is None else replace(record, sent_bytes=sync.report().sent_bytes)


def accumulating(model: nn.Module, wanted: bool) -> AbstractContextManager[None]:
    """What DDP needs around every pass but the last; Syncline was told when it was made."""
    if wanted and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()


class Stopwatch:
    """Measures how long `backward()` goes on after the last gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.last = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.note)  # type: ignore[no-untyped-call]

    def note(self, _: nn.Parameter) -> None:
        """A gradient is there."""
        self.last = time.perf_counter()

    def backward(self, loss: Tensor) -> float:
        """Seconds from the last gradient to the end."""
        torch.autograd.backward(loss)
        return time.perf_counter() - self.last


def progress_of(rank: int, title: str) -> Progress:
    """A live line, which rank 0 shows."""
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=rank != 0)
