"""The same training with DDP over Gloo and with Syncline: same seed, same batches, same number of steps.

Exposed communication is measured alike for both: from the moment the last gradient of a backward pass is there to the
moment `backward()` returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from syncline.bench.contenders import Contender
from syncline.bench.metering import Meter
from syncline.bench.timing import seconds_of
from syncline.bench.trainer import Trainer
from syncline.bench.workloads import adamw, gpt_workload
from syncline.errors import SynclineError
from syncline.fabric.base import Fabric
from syncline.launch import run

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
    busy_elsewhere: float = 0.0  # cores that other processes took

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


def train_side_by_side(request: Request) -> dict[str, Record]:
    """First DDP, then ours; an error if they learn different things."""
    records = {}
    for method in METHODS:
        fabric = "torch" if method == "ddp" else "auto"
        work = partial(run, partial(train, method=method, request=request), ranks=request.workers, fabric=fabric)
        by_rank, busy_elsewhere = Meter().run(work)
        records[method] = replace(by_rank[0], busy_elsewhere=busy_elsewhere)
    ddp, ours = (records[method].losses[-1] for method in METHODS)
    if request.codec == "none" and abs(ddp - ours) > MOST_DIFFERENCE * abs(ddp):
        raise SynclineError(f"the final losses differ: DDP {ddp}, Syncline {ours}; please report this")
    return records


def train(fabric: Fabric, method: str, request: Request) -> Record:
    """On one rank."""
    settings = {"collective": request.collective, "accumulate": request.accumulate}
    contender = Contender("ddp") if method == "ddp" else Contender(f"syncline {request.codec}", settings=settings)
    workload = gpt_workload(request.size, request.batch, partial(adamw, rate=1e-3))
    trainer = Trainer(workload, contender, fabric, request.accumulate, times_exposed=True)
    nbytes = sum(p.nbytes for p in trainer.model.parameters())
    record = Record([], [], [], nbytes, nbytes)
    with progress_of(fabric.rank, METHODS[method]) as progress:
        task = progress.add_task(METHODS[method], total=request.steps, loss="", speed="")
        for _ in range(request.steps):
            record.step_s.append(seconds_of(fabric, trainer.step))
            record.exposed_s.append(trainer.exposed_s)
            record.losses.append(trainer.mean_loss())
            share = 100 * sum(record.exposed_s) / sum(record.step_s)
            speed = f"{1 / record.step_s[-1]:.2f} steps/s, {share:.0f} % exposed"
            progress.update(task, advance=1, loss=f"loss {record.losses[-1]:.3f}", speed=speed)
    return replace(record, sent_bytes=round(trainer.attached.message_bytes()))


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
