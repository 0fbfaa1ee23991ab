"""The trainer of all benchmarks: a workload, and a contender that keeps its replicas in step.

A step is written here once, as a user writes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.bench.contenders import Attach
from syncline.bench.timing import most_of_ranks, seconds_of
from syncline.fabric.base import Fabric
from syncline.reducer.heap import keep_freed_memory

Loss = Callable[[nn.Module, int, int], Tensor]  # of a model, in a step, on a rank


@dataclass(frozen=True)
class Workload:
    """What is trained."""

    title: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    loss: Loss


class Trainer:
    """One replica on one rank."""

    def __init__(
        self,
        workload: Workload,
        attach: Attach,
        fabric: Fabric,
        accumulate: int = 1,
        times_exposed: bool = False,
    ) -> None:
        """`times_exposed`: also time what `backward()` takes after the last gradient; costs a hook a parameter."""
        if fabric.name != "threads":  # which would change it for the whole process
            torch.set_num_threads(1)
        self.fabric, self.workload, self.accumulate = fabric, workload, accumulate
        self.model = workload.model()
        keep_freed_memory(max(parameter.nbytes for parameter in self.model.parameters()))
        self.optimizer = workload.optimizer(self.model)
        self.last_gradient: float | None = None
        if times_exposed:
            for parameter in self.model.parameters():
                parameter.register_post_accumulate_grad_hook(self.note_gradient)  # type: ignore[no-untyped-call]
        self.attached = attach(self.model, self.optimizer, fabric)
        self.losses: list[Tensor] = []  # of every step on this rank
        self.exposed_s = 0.0  # of the last step

    def note_gradient(self, _: nn.Parameter) -> None:
        """Remember when the last gradient was there."""
        self.last_gradient = time.perf_counter()

    def step(self, number: int | None = None) -> Tensor:
        """Make one step, with the batch of this number or the next one; returns the loss on this rank."""
        number = len(self.losses) if number is None else number
        self.exposed_s, total = 0.0, torch.zeros(())
        self.optimizer.zero_grad()
        for part in range(self.accumulate):
            with self.pausing(part + 1 < self.accumulate):
                batch = number * self.accumulate + part
                loss = self.workload.loss(self.attached.module, batch, self.fabric.rank) / self.accumulate
                torch.autograd.backward(loss)
            if self.last_gradient is not None:
                self.exposed_s += time.perf_counter() - self.last_gradient
            total = loss.detach() * self.accumulate
        self.optimizer.step()
        self.losses.append(total)
        return total

    def pausing(self, wanted: bool) -> AbstractContextManager[None]:
        """What DDP needs around every pass but the last; Sync was told when it was made."""
        if wanted and isinstance(self.attached.module, DistributedDataParallel):
            return self.attached.module.no_sync()
        return nullcontext()

    def timed_steps(self, count: int) -> tuple[list[float], list[float]]:
        """Seconds of so many steps, and how much of each was exposed communication, on the slowest rank of each."""
        seconds, exposed = [], []
        for _ in range(count):
            seconds.append(seconds_of(self.fabric, self.step))
            exposed.append(self.exposed_s)
        most = most_of_ranks(self.fabric, [*seconds, *exposed])
        return most[:count], most[count:]

    def mean_loss(self, step: int = -1) -> float:
        """The mean over ranks of the loss in a step."""
        return float(self.fabric.all_reduce(self.losses[step].clone(), op="mean"))

    def close(self) -> None:
        """End what keeps the replicas in step."""
        self.attached.close()
