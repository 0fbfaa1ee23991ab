"""A server: the parameters of some buckets, the optimizer that moves them, and the clock that says who may go on.

Workers stage the gradients of a step bucket by bucket and then commit them: until then nothing has happened, so a
worker that dies in the middle leaves no trace. Each commit is one step of the optimizer, with the learning rate divided
by the number of workers, so that a round of all of them goes as far as one synchronous step. In lockstep (a bound of
0) nobody could tell in which order commits came: they are averaged, and are one synchronous step exactly.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.buckets.bucket import Slot
from syncline.errors import PeerStalled
from syncline.modes.serving.clock import Clock
from syncline.modes.serving.optimizers import Groups, adopt_groups, moved
from syncline.modes.serving.shelf import Shelf

Gradients = dict[str, Tensor]  # by parameter; those that a worker has none of are missing


@dataclass(frozen=True)
class Rules:
    """How a server applies what comes."""

    bound: float  # steps that a worker may be ahead of the slowest
    shares: bool  # divide learning rates by the number of workers
    damping: bool  # divide learning rates by 1 + staleness
    compensation: float  # of delay: how much of the second-order term is added to a gradient

    @property
    def lockstep(self) -> bool:
        """Whether all commits of a step are one."""
        return self.bound == 0


class Update(NamedTuple):
    """A commit that was applied."""

    worker: int
    step: int
    staleness: int  # updates by others between the worker's last read and this


@dataclass
class Worker:
    """What a server knows of a worker."""

    version: int = 0  # that it read last
    staged: dict[int, Callable[[], Gradients]] = field(default_factory=dict)  # by bucket
    read: dict[str, Tensor] = field(default_factory=dict)  # what it read, where delays are compensated


class Server:
    """Serves some buckets."""

    def __init__(
        self,
        rank: int,
        buckets: Mapping[int, Sequence[Slot]],
        optimizers: Sequence[Optimizer],
        workers: Iterable[int],
        rules: Rules,
        shared: bool,
        deadline_s: float,
    ) -> None:
        self.rank = rank
        self.rules = rules
        self.deadline_s = deadline_s
        self.shelves = {number: Shelf(slots, shared) for number, slots in buckets.items()}
        self.parameters = {name: p for shelf in self.shelves.values() for name, p in shelf.parameters.items()}
        places = {slot.parameter: self.parameters[slot.name] for slots in buckets.values() for slot in slots}
        self.optimizers = moved(optimizers, places)
        self.clock = Clock(workers, rules.bound)
        self.workers = {worker: Worker() for worker in self.clock.steps}
        self.version = 0
        self.round: dict[int, tuple[Gradients | None, Groups]] = {}  # commits that wait for the others, in lockstep
        self.updates: deque[Update] = deque(maxlen=100_000)
        self.met: set[int] = set()  # workers that wait for all others
        self.meetings = 0
        self.snapshot: dict[str, Any] = {}
        self.changed = threading.Condition()

    # What workers ask for

    def stage(self, worker: int, bucket: int, decode: Callable[[], Gradients]) -> None:
        """Gradients of a bucket have come, and count when they are committed."""
        with self.changed:
            if worker in self.workers:
                self.workers[worker].staged[bucket] = decode

    def commit(self, worker: int, step: int, good: bool, groups: Groups) -> int:
        """A worker's step is complete; returns how stale it was."""
        with self.changed:
            one = self.workers.get(worker)
            if one is None:
                return 0
            staged, one.staged = one.staged, {}
            gradients: Gradients = {}
            for decode in staged.values():
                gradients |= decode() if good else {}
            self.clock.tick(worker, step)
            staleness = self.version - one.version
            if self.rules.lockstep:
                self.round[worker] = (gradients if good else None, groups)
                self.finish_round()
            elif good:
                self.apply(worker, gradients, groups, staleness)
                self.updates.append(Update(worker, step, staleness))
            self.changed.notify_all()
            return staleness

    def apply(self, worker: int, gradients: Gradients, groups: Groups, staleness: int) -> None:
        """One step of the optimizers."""
        factor = 1.0
        if self.rules.shares:
            factor /= len(self.clock.steps)
        if self.rules.damping:
            factor /= 1 + staleness
        if self.rules.compensation:
            self.compensate(gradients, self.workers[worker].read)
        self.step(gradients, groups, factor)

    def compensate(self, gradients: Gradients, read: dict[str, Tensor]) -> None:
        """DC-ASGD: what the gradient would be here, by its first-order change from where it was computed."""
        for name, gradient in gradients.items():
            moved_by = self.parameters[name].detach() - read[name]
            gradient.addcmul_(gradient.square(), moved_by, value=self.rules.compensation)

    def step(self, gradients: Gradients, groups: Groups, factor: float) -> None:
        """Move the parameters that have a gradient."""
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            parameter.grad = gradient.view_as(parameter) if gradient is not None else None
        adopt_groups(self.optimizers, groups, factor)
        for optimizer in self.optimizers:
            optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        self.version += 1

    def finish_round(self) -> None:
        """In lockstep: when all workers have committed, step with their mean, unless one of them is bad."""
        if not self.round or not set(self.clock.steps) <= set(self.round):
            return
        commits = [self.round[worker] for worker in sorted(self.round)]
        self.round = {}
        gradients = [gradients for gradients, _ in commits if gradients is not None]
        if len(gradients) == len(commits):
            self.step(mean_of(gradients), commits[0][1], 1.0)

    def wait_for_turn(self, worker: int) -> None:
        """Until a worker may go on."""
        with self.changed:
            self.wait(worker, lambda: self.clock.may_go_on(worker))

    def read(self, worker: int) -> int:
        """A worker takes the parameters as they are now; the lock is held, and the version returned."""
        one = self.workers[worker]
        one.version = self.version
        if self.rules.compensation:
            one.read = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.clock.note_read(worker, self.version)
        return self.version

    def meet(self, worker: int) -> None:
        """Until all workers are here, and a snapshot of that moment has been made."""
        with self.changed:
            self.met.add(worker)
            number = self.meetings
            self.finish_meeting()
            self.wait(worker, lambda: self.meetings > number)

    def finish_meeting(self) -> None:
        """When all workers are here: what a checkpoint needs."""
        if self.met and set(self.clock.steps) <= self.met:
            self.met = set()
            self.meetings += 1
            self.snapshot = self.state_dict()
            self.changed.notify_all()

    def leave(self, worker: int) -> None:
        """A worker has left, or is lost: nobody waits for it, and what it did not commit never was."""
        with self.changed:
            self.clock.drop(worker)
            self.workers.pop(worker, None)
            self.met.discard(worker)
            self.round.pop(worker, None)
            self.finish_round()
            self.finish_meeting()
            self.changed.notify_all()

    def enter(self, worker: int) -> int:
        """A worker comes, or comes again, and is as far as the slowest; returns its clock."""
        with self.changed:
            clock = self.clock.enter(worker)
            self.workers[worker] = Worker()
            self.read(worker)
            return clock

    def wait(self, worker: int, until: Callable[[], bool]) -> None:
        """With the lock held, for the others."""
        end = time.monotonic() + self.deadline_s
        while not until():
            if not self.changed.wait(end - time.monotonic()) and time.monotonic() >= end:
                slowest = min(self.clock.steps, key=self.clock.steps.__getitem__, default=worker)
                raise PeerStalled(
                    slowest, f"worker {worker} waited {self.deadline_s} s at server {self.rank} for worker {slowest}"
                )

    def wait_until_left(self, deadline_s: float) -> bool:
        """Until all workers have left; False if some never do."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.clock.steps, deadline_s)

    # To be saved and restored

    def state_dict(self) -> dict[str, Any]:
        """Parameters and what optimizers keep, by parameter; the lock is held."""
        return {
            "version": self.version,
            "parameters": {name: p.detach().clone() for name, p in self.parameters.items()},
            "optimizers": [self.optimizer_state(optimizer) for optimizer in self.optimizers],
        }

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """By parameter."""
        names = {id(p): name for name, p in self.parameters.items()}
        return {
            names[id(p)]: {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
            for p, state in optimizer.state.items()
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there; what is saved of other servers' parameters is left alone."""
        with self.changed:
            self.version = saved["version"]
            for one in self.workers.values():
                one.version = self.version
            for name, parameter in self.parameters.items():
                parameter.copy_(saved["parameters"][name])
            for optimizer, states in zip(self.optimizers, saved["optimizers"], strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = float(group["lr"])
                optimizer.state.clear()
                for name, state in states.items():
                    if name in self.parameters:
                        optimizer.state[self.parameters[name]] = {
                            key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()
                        }

    def close(self) -> None:
        """Give back memory."""
        for shelf in self.shelves.values():
            shelf.close()


def mean_of(gradients: Sequence[Gradients]) -> Gradients:
    """Over workers, in order; one that has none of a parameter counts as zero."""
    means: Gradients = {}
    for name in dict.fromkeys(name for one in gradients for name in one):
        present = [one[name] for one in gradients if name in one]
        wide = torch.promote_types(present[0].dtype, torch.float32)
        total = present[0].to(wide, copy=True)
        for other in present[1:]:
            total += other
        means[name] = total.div_(len(gradients)).to(present[0].dtype)
    return means
