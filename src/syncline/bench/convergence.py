"""What codecs do to learning: real training with each of them, against dense, over seeds and at equal steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

from torch import nn

from syncline.bench.learning import Trained, momentum_for, train
from syncline.bench.notes import told_by_others, write_note
from syncline.bench.tasks import task_of
from syncline.codecs.registry import codec_of
from syncline.errors import SynclineError
from syncline.fabric.base import Fabric
from syncline.launch import run

DENSE = "none"
CODECS: tuple[str, ...] = (
    DENSE,
    "fp16",
    "bf16",
    "int8",
    "int4",
    "onebit",
    "onebit:block=512",
    "topk:0.01",
    "warmup:steps=50,codec=(topk:0.01)",
    "randomk:0.01",
    "powersgd:4",
    "dgc",
    "dgc:masking=true",
)


@dataclass(frozen=True)
class ConvergenceRow:
    """One codec on one workload; means over seeds."""

    workload: str
    title: str
    codec: str
    momentum: float  # of the optimizer
    ranks: int
    seeds: int
    steps: int
    sent_bytes: float  # by a rank in a step
    end_sent_bytes: float
    times_less: float  # than dense, over the whole training
    loss: float
    losses: list[float]  # of every seed
    ratio: float  # of the loss to that of dense
    accuracy: float | None
    curve: list[float]

    @property
    def has_diverged(self) -> bool:
        """Whether a seed ended in gradients that are not finite."""
        return not math.isfinite(self.loss)


def compare_codecs(
    workloads: Sequence[str],
    codecs: Sequence[str],
    seeds: int,
    steps: int | None,
    ranks: int,
    tell: Callable[[str], None],
    fabric: str = "auto",
    rate: float | None = None,
) -> list[ConvergenceRow]:
    """Every codec on every workload. Dense is trained first, whether it was asked for or not."""
    rows = []
    for workload in workloads:
        task = task_of(workload)
        length = steps or task.steps
        starts = [task.model(seed) for seed in range(seeds)]  # not on the ranks: threads share torch's random numbers
        with told_by_others(tell) as notes:
            work = partial(
                train_all, starts=starts, workload=workload, codecs=codecs, steps=length, rate=rate, notes=notes
            )
            by_rank = run(work, ranks=ranks, fabric=fabric)
        check_digests(workload, by_rank)
        dense = by_rank[0][DENSE]
        rows += [row_of(workload, codec, ranks, length, found, dense) for codec, found in by_rank[0].items()]
    return rows


def train_all(
    fabric: Fabric,
    starts: Sequence[nn.Module],
    workload: str,
    codecs: Sequence[str],
    steps: int,
    rate: float | None,
    notes: Path,
) -> dict[str, list[Trained]]:
    """Every codec with every seed, one after the other on the same ranks; starting ranks anew would take longer."""
    log = logging.getLogger("syncline")
    log.setLevel(logging.ERROR)  # what codecs say of themselves is in the table
    trained: dict[str, list[Trained]] = {}
    for codec in dict.fromkeys([DENSE, *codecs]):
        for seed, start in enumerate(starts):
            if fabric.rank == 0:
                write_note(notes, f"{workload}, {codec}, seed {seed}")
            trained.setdefault(codec, []).append(train(fabric, start, workload, codec, seed, steps, rate))
    log.setLevel(logging.NOTSET)
    return trained


def check_digests(workload: str, by_rank: Sequence[dict[str, list[Trained]]]) -> None:
    """Ranks must end with the same bits."""
    for codec in by_rank[0]:
        for same in zip(*(of_rank[codec] for of_rank in by_rank), strict=True):
            if any(one.digests != same[0].digests for one in same):
                raise SynclineError(f"{workload}, {codec}: ranks have different weights, so their loss means nothing")


def row_of(
    workload: str, codec: str, ranks: int, steps: int, trained: Sequence[Trained], dense: Sequence[Trained]
) -> ConvergenceRow:
    """The means over seeds."""
    losses = [one.score.loss for one in trained]
    sent = mean(one.sent_bytes for one in trained)
    accuracies = [one.score.accuracy for one in trained if one.score.accuracy is not None]
    return ConvergenceRow(
        workload=workload,
        title=task_of(workload).title,
        codec=codec,
        momentum=momentum_for(codec_of(codec)),
        ranks=ranks,
        seeds=len(trained),
        steps=steps,
        sent_bytes=sent,
        end_sent_bytes=mean(one.end_sent_bytes for one in trained),
        times_less=mean(one.sent_bytes for one in dense) / sent,
        loss=mean(losses),
        losses=losses,
        ratio=mean(losses) / mean(one.score.loss for one in dense),
        accuracy=mean(accuracies) if accuracies else None,
        curve=[mean(points) for points in zip(*(one.curve for one in trained), strict=True)],
    )
