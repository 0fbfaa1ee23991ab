"""What each mode comes to, simulated in one process with plain torch: the references of the parity suite.

sync       one process has the batches of all ranks
delayed    the same, and an optimizer steps with the gradients that its step before would have used
local ...  a replica for each rank, in threads: all step alone, and their parameters are averaged every H steps
bounded    a replica for each rank: the gradients that they would step with are averaged, then all step
async      a replica for each rank, and a server: they step there in turn, with an equal share of the learning rate

A step whose gradients are not finite changes nothing.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from support.on_a_line import Turns
from support.runs import Result, Run, put_around_step
from support.scenarios import Scenario

PATIENCE_S = 20.0


class Simulated(Run):
    """A replica. Its hooks on steps are between those that were set before a `Sync` would be made and after it."""

    def __init__(self, scenario: Scenario, ranks: Sequence[int], world: int) -> None:
        super().__init__(scenario, ranks, world, seed=0)
        self.withheld: list[tuple[nn.Parameter, Tensor]] = []
        self.groups = [[one] for one in self.optimizers] if scenario.parts else [self.optimizers]  # one for each Sync
        self.stepped: set[Optimizer] = set()  # in this round
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda one, *_: self.before_step(one))
            optimizer.register_step_post_hook(lambda one, *_: self.after_step(one))

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def before_step(self, optimizer: Optimizer) -> None:
        if not all(bool(gradient.isfinite().all()) for gradient in self.gradients()):
            self.withhold(parameters_of(optimizer))

    def withhold(self, parameters: Iterable[nn.Parameter]) -> None:
        """Optimizers leave parameters alone that have no gradient."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.withheld.append((parameter, parameter.grad))
                parameter.grad = None

    def after_step(self, optimizer: Optimizer) -> None:
        for parameter, gradient in self.withheld:
            parameter.grad = gradient
        self.withheld.clear()
        self.stepped.add(optimizer)
        for group in self.groups:
            if self.stepped.issuperset(group):
                self.stepped.difference_update(group)
                self.after_round(group)

    def after_round(self, group: Sequence[Optimizer]) -> None:
        """All optimizers of a Sync have made a step since the last time."""


def parameters_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    return [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]


# Delayed


class Delayed(Simulated):
    """A parameter's share of a pass counts if its optimizer steps before the next pass, and then in its next step."""

    def __init__(self, scenario: Scenario, ranks: Sequence[int], world: int) -> None:
        super().__init__(scenario, ranks, world)
        self.fresh: dict[nn.Parameter, Tensor] = {}  # of the last pass
        self.late: dict[nn.Parameter, Tensor] = {}  # of the last step
        self.is_paused = self.is_at_hand = False
        self.model.register_forward_pre_hook(lambda *_: self.before_forward())
        if self.scaler is not None:
            self.scaler.step = partial(self.scaled_step, self.scaler.step)
        for optimizer in self.optimizers:
            put_around_step(optimizer, self.step_if_due)

    def step_if_due(self, step: Callable, optimizer: Optimizer) -> None:
        """There is no step, and nothing that comes after one, where there is nothing yet."""
        if self.late:
            step()
        else:
            self.after_step(optimizer)

    @contextmanager
    def more_to_come(self) -> Iterator[None]:
        self.is_paused = True
        yield
        self.is_paused = False

    no_sync = more_to_come

    def backward_of(self, loss: Tensor) -> None:
        super().backward_of(loss)
        if not self.is_paused:
            self.exchange()

    def exchange(self) -> None:
        """Gradients of this pass for those of the step before; they are kept in units of the loss."""
        scale = self.scaler.get_scale() if self.scaler is not None else 1.0
        self.fresh = {p: p.grad / scale for p in self.model.parameters() if p.grad is not None}
        self.hand_out(scale)
        self.is_at_hand = True

    def hand_out(self, scale: float) -> None:
        """Where there is nothing yet, loops that look at gradients find zeros, with which nobody steps."""
        for parameter in self.model.parameters():
            late = self.late.get(parameter)
            nothing = torch.zeros_like(parameter) if parameter in self.fresh else None
            parameter.grad = late * scale if late is not None else nothing

    def before_step(self, optimizer: Optimizer) -> None:
        super().before_step(optimizer)
        self.withhold(parameter for parameter in parameters_of(optimizer) if parameter not in self.late)

    def after_step(self, optimizer: Optimizer) -> None:
        super().after_step(optimizer)
        self.is_at_hand = False
        self.commit(optimizer)

    def scaled_step(self, step: Callable[[Optimizer], Any], optimizer: Optimizer) -> None:
        """What is fresh counts also where the scaler leaves out the step, because what was late is not finite."""
        waiting = {parameter for parameter in parameters_of(optimizer) if parameter in self.fresh}
        step(optimizer)
        if waiting & self.fresh.keys():
            self.commit(optimizer)

    def commit(self, optimizer: Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            self.late.pop(parameter, None)
            if parameter in self.fresh:
                self.late[parameter] = self.fresh.pop(parameter)

    def before_forward(self) -> None:
        if not self.model.training and not self.is_at_hand:
            self.drain()

    def drain(self) -> None:
        if self.late:
            self.hand_out(1.0)
            for optimizer in self.optimizers:
                optimizer.step()
            self.late.clear()


# Several replicas


@dataclass
class Together:
    """Replicas that are threads, and tell each other what they have; those that are done are not waited for."""

    world: int
    active: set[int] = field(init=False)
    given: dict[int, Any] = field(default_factory=dict)  # by rank, in this round
    answers: dict[int, dict[int, Any]] = field(default_factory=dict)  # by round
    newest: Any = None  # what the one had that was the last to leave
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.active = set(range(self.world))

    def all(self, rank: int, mine: Any) -> list[Any]:
        """What all have that are still here."""
        with self.changed:
            self.given[rank] = mine
            number = len(self.answers)
            self.complete()
            self.wait(lambda: number in self.answers)
            return list(self.answers[number].values())

    def complete(self) -> None:
        if self.active and self.given.keys() >= self.active:
            self.answers[len(self.answers)] = dict(sorted(self.given.items()))
            self.given = {}
        self.changed.notify_all()

    def leave(self, rank: int, mine: Any) -> Any:
        """What the last one has, when all have left."""
        with self.changed:
            self.active.discard(rank)
            self.newest = mine
            self.complete()
            self.wait(lambda: not self.active)
            return self.newest

    def wait(self, until: Callable[[], bool]) -> None:
        if not self.changed.wait_for(until, PATIENCE_S):
            raise TimeoutError("replicas do not come together")


class Replica(Simulated):
    """One of several."""

    def __init__(self, scenario: Scenario, rank: int, together: Together) -> None:
        super().__init__(scenario, [rank], together.world)
        self.rank = rank
        self.together = together

    def mean(self, loss: Tensor) -> Tensor:
        return torch.stack(self.together.all(self.rank, loss.detach())).mean(0)


# Periodic

Outer = Callable[[str, Tensor, Tensor, float], Tensor]  # name, where all were, their mean now, learning rate


class Follow:
    """Local SGD: ranks meet where they are on average."""

    def __call__(self, name: str, anchor: Tensor, mean: Tensor, rate: float) -> Tensor:
        return mean


@dataclass
class SlowMomentum:
    """u = m * u + (anchor - mean) / rate; anchor - lr * rate * u."""

    lr: float
    momentum: float
    remembered: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, anchor: Tensor, mean: Tensor, rate: float) -> Tensor:
        self.remembered[name] = self.momentum * self.remembered.get(name, 0.0) + (anchor - mean) / rate
        return anchor - self.lr * rate * self.remembered[name]


@dataclass
class Nesterov:
    """The outer optimizer of DiLoCo is torch's, and how far ranks have come is its gradient."""

    lr: float
    momentum: float
    optimizers: dict[str, SGD] = field(default_factory=dict)

    def __call__(self, name: str, anchor: Tensor, mean: Tensor, rate: float) -> Tensor:
        if name not in self.optimizers:
            place = nn.Parameter(anchor.clone())
            self.optimizers[name] = SGD([place], self.lr, self.momentum, nesterov=True)
        (place,) = parameters_of(self.optimizers[name])
        place.data.copy_(anchor)
        place.grad = anchor - mean
        self.optimizers[name].step()
        return place.detach().clone()


class Periodic(Replica):
    """Steps alone, and meets the others every so many rounds, or updates of a scaler, which may leave out a step."""

    def __init__(self, scenario: Scenario, rank: int, together: Together, every: int, outer: Outer) -> None:
        super().__init__(scenario, rank, together)
        self.every, self.outer, self.alone = every, outer, [0] * len(self.groups)
        self.moved = [False] * len(self.groups)  # since they were equal, by one optimizer of several
        self.loaded()
        if self.scaler is not None:
            update = self.scaler.update
            self.scaler.update = lambda: (update(), self.count(self.optimizers))

    def loaded(self) -> None:
        """Here all ranks are equal, and from here they go different ways."""
        self.anchors = {p: p.detach().clone() for p in self.model.parameters() if p.requires_grad}

    def after_step(self, optimizer: Optimizer) -> None:
        self.moved = [moved or optimizer in group for moved, group in zip(self.moved, self.groups, strict=True)]
        super().after_step(optimizer)

    def after_round(self, group: Sequence[Optimizer]) -> None:
        if self.scaler is None:
            self.count(group)

    def count(self, group: Sequence[Optimizer]) -> None:
        number = self.groups.index(list(group))
        self.alone[number] += 1
        if self.alone[number] == self.every:
            self.meet(number)

    @torch.no_grad()
    def meet(self, number: int) -> None:
        rates = {p: group["lr"] for one in self.optimizers for group in one.param_groups for p in group["params"]}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter in parameters_of(*self.groups[number]):
            if parameter in self.anchors:
                mean = torch.stack(self.together.all(self.rank, parameter.detach().clone())).mean(0)
                anchor = self.outer(names[parameter], self.anchors[parameter], mean, rates[parameter])
                parameter.copy_(anchor)
                self.anchors[parameter] = anchor
        self.alone[number], self.moved[number] = 0, False

    def drain(self) -> None:
        for number, steps in enumerate(self.alone):
            if steps or self.moved[number]:
                self.meet(number)


# Servers


class Lockstep(Replica):
    """Each changes its own gradients as it likes; all step with the mean, where one that has none counts as zero.

    One whose scaler leaves out a step is behind from then on; those that come after it left are without it.
    """

    def before_step(self, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        given = self.together.all(self.rank, [parameter.grad for parameter in parameters])
        for parameter, gradients in zip(parameters, zip(*given, strict=True), strict=True):
            present = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = sum(present) / len(given) if present else None
        super().before_step(optimizer)

    @torch.no_grad()
    def result(self) -> Result:
        newest = self.together.leave(self.rank, list(self.model.parameters()))
        for own, last in zip(self.model.parameters(), newest, strict=True):
            own.copy_(last)
        return super().result()


class Server:
    """The model and the optimizers that all have."""

    def __init__(self, run: Run) -> None:
        self.model, self.optimizers = copy.deepcopy((run.model, run.optimizers))
        self.turns = Turns(run.world)


class InTurn(Replica):
    """Steps at a server when it is its turn, and takes the parameters from there."""

    def __init__(self, scenario: Scenario, rank: int, together: Together) -> None:
        super().__init__(scenario, rank, together)
        self.server: Server = together.all(rank, Server(self))[0]
        self.has_turn = False

    def before_step(self, optimizer: Optimizer) -> None:
        if not self.has_turn:
            self.server.turns.take(self.rank)
            self.has_turn = True
        super().before_step(optimizer)
        self.step_at_server(optimizer, self.server.optimizers[self.optimizers.index(optimizer)])
        self.withhold(parameters_of(optimizer))

    def step_at_server(self, here: Optimizer, there: Optimizer) -> None:
        for own, group in zip(here.param_groups, there.param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"}, lr=own["lr"] / self.world)
        for own, served in zip(parameters_of(here), parameters_of(there), strict=True):
            served.grad = own.grad.clone() if own.grad is not None else None
        there.step()

    def after_round(self, group: Sequence[Optimizer]) -> None:
        self.take_parameters(group)
        self.has_turn = False
        self.server.turns.pass_on()

    @torch.no_grad()
    def take_parameters(self, group: Sequence[Optimizer]) -> None:
        for optimizer in group:
            there = self.server.optimizers[self.optimizers.index(optimizer)]
            for own, served in zip(parameters_of(optimizer), parameters_of(there), strict=True):
                own.copy_(served)

    def drain(self) -> None:
        self.together.all(self.rank, None)
        self.take_parameters(self.optimizers)


# All of them

Make = Callable[[Scenario, int, Together], Run]


def in_one_process(kind: Callable[[Scenario, Sequence[int], int], Run], scenario: Scenario, world: int) -> list[Result]:
    """One replica that has the batches of all ranks: the result of each."""
    return [result_of(kind(scenario, range(world), world))] * world


def in_threads(make: Make, scenario: Scenario, world: int) -> list[Result]:
    """A replica for each rank."""
    together = Together(world)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: result_of(make(scenario, rank, together)), range(world)))


def result_of(run: Run) -> Result:
    run.scenario.loop(run)
    run.drain()
    return run.result()
