"""A server: the parameters of some buckets, the optimizer that moves them, and the clock that says who may go on.

Workers stage the gradients of a step bucket by bucket and then commit them: until then nothing has happened, so a
worker that dies in the middle leaves no trace. Each commit is one step of the optimizer, with the learning rate divided
by the number of workers, so that a round of all of them goes as far as one synchronous step. In lockstep (a bound of
0) nobody could tell in which order commits came: they are averaged, and are one synchronous step exactly.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.modes.serving.clock import Clock
from syncline.modes.serving.optimizers import Groups, adopt_groups, moved
from syncline.modes.serving.shelf import Shelf
from syncline.path.bucket import Slot

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


class Commit(NamedTuple):
    """A complete step of a worker that waits for those of the others, in lockstep."""

    step: int
    gradients: Gradients | None  # None where it is bad
    groups: Groups


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
        self.away: set[int] = set()  # workers that have left and will come back
        self.version = 0
        self.round: dict[int, Commit] = {}  # by worker; in lockstep
        self.applied = True  # the last round, which has been skipped where a commit was bad
        self.updates: deque[Update] = deque(maxlen=100_000)
        self.meetings = 0
        self.snapshot: dict[str, Any] = {}
        self.lent: dict[int, int] = {}  # workers that read in place, and until when nothing changes for them
        self.changed = threading.Condition()
        self.beginning = set(self.workers)  # those that have not entered yet; they have what the server begins with
        for worker in self.beginning:
            self.read(worker)

    # What workers ask for

    def stage(self, worker: int, bucket: int, decode: Callable[[], Gradients]) -> None:
        """Gradients of a bucket have come, and count when they are committed."""
        with self.changed:
            if worker in self.workers:
                self.workers[worker].staged[bucket] = decode

    def commit(self, worker: int, step: int, good: bool, groups: Groups) -> int:
        """A worker's step is complete; returns how stale it was."""
        with self.changing():
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
                self.round[worker] = Commit(step, gradients if good else None, groups)
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
            factor /= len(self.workers)
        if self.rules.damping:
            factor /= 1 + staleness
        if self.rules.compensation:
            self.compensate(gradients, self.workers[worker].read)
        self.step(gradients, groups, factor)

    def compensate(self, gradients: Gradients, read: dict[str, Tensor]) -> None:
        """DC-ASGD: what the gradient would be here, by its first-order change from where it was computed."""
        for name, gradient in gradients.items():
            moved_by = (self.parameters[name].detach() - read[name]).view_as(gradient)
            gradients[name] = gradient.addcmul(gradient.square(), moved_by, value=self.rules.compensation)

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
        """In lockstep: when all workers are this far, step with the mean of their commits, unless one is bad."""
        if not self.round or any(commit.step > self.clock.slowest for commit in self.round.values()):
            return
        commits = [self.round[worker] for worker in sorted(self.round)]
        self.round = {}
        gradients = [commit.gradients for commit in commits if commit.gradients is not None]
        self.applied = len(gradients) == len(commits)
        if self.applied:
            self.step(mean_of(gradients), commits[0].groups, 1.0)

    def catch_up(self, worker: int, step: int) -> None:
        """A worker that has come is as far as it was told elsewhere."""
        with self.changing():
            self.clock.tick(worker, step)
            self.finish_round()
            self.changed.notify_all()

    def read(self, worker: int) -> int:
        """A worker takes the parameters as they are now; the lock is held, and the version returned."""
        one = self.workers[worker]
        one.version = self.version
        if self.rules.compensation:
            one.read = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.clock.note_read(worker, self.version)
        return self.version

    def lend(self, worker: int) -> tuple[int, int]:
        """A worker reads in place: the version, and until when, on the clock of this machine, nothing changes.

        That is less than other workers wait for an answer. One that was stopped meanwhile notices and reads again.
        """
        with self.changed:
            self.lent[worker] = monotonic_ns() + int(self.deadline_s / 4 * 1e9)
            return self.read(worker), self.lent[worker]

    def give_back(self, worker: int) -> None:
        """A worker has read."""
        with self.changed:
            self.lent.pop(worker, None)
            self.changed.notify_all()

    @contextmanager
    def changing(self, without: int = -1) -> Iterator[None]:
        """Nobody reads in place, or is late, or is gone."""
        with self.changed:
            self.lent.pop(without, None)
            while (left_ns := max(self.lent.values(), default=0) - monotonic_ns()) > 0:
                self.changed.wait(left_ns / 1e9)
            yield

    def meet(self, worker: int, step: int) -> int:
        """A worker waits for all others, which do not wait for it; returns the number of the meeting."""
        with self.changing():
            self.clock.rest(worker, step)
            number = self.meetings + 1
            self.finish_round()
            self.finish_meeting()
            self.changed.notify_all()
            return number

    def finish_meeting(self) -> None:
        """When all workers are here: what a checkpoint needs."""
        if self.clock.resting and not self.clock.steps:
            self.clock.resume()
            self.meetings += 1
            self.snapshot = self.state_dict()
            self.changed.notify_all()

    def leave(self, worker: int, comes_back: bool = False) -> None:
        """A worker has left, or is lost: nobody waits for it, and what it did not commit never was."""
        with self.changing(worker):
            (self.away.add if comes_back else self.away.discard)(worker)
            self.clock.drop(worker)
            self.workers.pop(worker, None)
            self.beginning.discard(worker)
            self.round.pop(worker, None)
            self.finish_round()
            self.finish_meeting()
            self.changed.notify_all()

    def enter(self, worker: int) -> int:
        """A worker comes, or comes again, and is as far as the slowest; returns its clock."""
        with self.changed:
            clock = self.clock.enter(worker)
            self.away.discard(worker)
            if worker not in self.beginning:
                self.workers[worker] = Worker()
                self.read(worker)
            self.beginning.discard(worker)
            return clock

    def expect(self, worker: int) -> None:
        """A worker is about to come; the server does not end before."""
        with self.changed:
            self.away.add(worker)

    def wake(self) -> None:
        """Let those who wait look again."""
        with self.changed:
            self.changed.notify_all()

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """For workers to do something; False if it takes longer."""
        with self.changed:
            return self.changed.wait_for(until, seconds)

    def wait_until_left(self, seconds: float) -> bool:
        """Until all workers have left for good; False if it takes longer."""
        return self.wait(lambda: not self.workers and not self.away, seconds)

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
        with self.changing():
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
