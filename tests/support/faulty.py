"""Ranks that are killed, stopped, absent or interrupted while they train. Light: ranks import it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import syncline
from support.guarded import NOTE_S, ONE_EACH, Net, Trained, batch, filled, snapshot, train
from support.striking import be_killed, be_stopped, report_and_stay, strike_before, wait_for_reports
from syncline import replicas
from syncline.core.passes import PassCounter
from syncline.fabric.base import Fabric
from syncline.path.bucket import Bucket
from syncline.reducer.layout import Layout
from syncline.reducer.reducer import Reducer

# Faults


def arm_forward(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    model.second.register_forward_pre_hook(lambda *_: strike())


def arm_start_of_backward(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    """Before any gradient of a parameter is there."""
    model.third.register_forward_hook(lambda _, __, output: watch(output, strike))


def arm_between_buckets(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    """When the gradients of `third` have been sent, and before those of `second` are there."""
    model.second.register_forward_hook(lambda _, __, output: watch(output, strike))


def arm_optimizer(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    """Inside of the step, when `Sync` has let the gradients through."""
    optimizer.register_step_pre_hook(lambda *_: strike())


def watch(output: Tensor, strike: Callable[[], None]) -> None:
    output.register_hook(lambda _: strike())


def arm_call(owner: type, name: str, call: int = 1) -> Arm:
    """Inside of `Sync`, before a call of a method."""
    return lambda model, optimizer, strike: strike_before(owner, name, strike, call)


Arm = Callable[[nn.Module, Optimizer | None, Callable[[], None]], None]
PLACES: dict[str, Arm] = {
    "forward": arm_forward,
    "start of backward": arm_start_of_backward,
    "between buckets": arm_between_buckets,
    "all sent": arm_call(Reducer, "status_of"),
    "all arrived": arm_call(PassCounter, "compare"),
    "optimizer": arm_optimizer,
}
FIRST_STEP: dict[str, Arm] = {
    "before there are buckets": arm_call(Layout, "make_buckets"),
    "some buckets are made": arm_call(Bucket, "__init__", call=4),
}
CONSTRUCTION: dict[str, Arm] = {
    "comparing": arm_call(Fabric, "all_gather"),
    "before parameters": arm_call(Fabric, "broadcast"),
    "between parameters": arm_call(Fabric, "broadcast", call=4),
}
MAY_BE_WHOLE = ("all sent", "all arrived", "optimizer")  # when others may make the step without the victim


@dataclass(frozen=True)
class Strikes:
    """Something befalls a rank at a place of a step."""

    victim: int
    step: int
    place: str
    strike: Callable[[], None]

    def __call__(self, rank: int, step: int, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        if (rank, step) == (self.victim, self.step):
            (PLACES | FIRST_STEP | CONSTRUCTION)[self.place](model, optimizer, self.strike)

    def before_sync(self, rank: int, model: nn.Module) -> None:
        """Other weights on every rank, and a message for each of them; step 0 is when `Sync` is made."""
        filled(model, seed=rank)
        replicas.AT_A_TIME_BYTES = 1
        self(rank, 0, model)


def after_its_note(strike: Callable[[], None]) -> None:
    """Let the others be able to read how far this rank has come, then strike."""
    time.sleep(NOTE_S)
    strike()


killed = be_killed
killed_later = partial(after_its_note, be_killed)
stopped_later = partial(after_its_note, be_stopped)


def train_with_a_victim(fabric: Fabric, fault: Strikes, steps: int, folder: str) -> Trained:
    """Train until the victim is struck; when all others have said what they saw, the victim is removed."""
    pids = fabric.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
    trained = train(fabric, steps, before_step=fault, prepare=fault.before_sync, **ONE_EACH)
    if fabric.rank != fault.victim:
        report_and_stay(fabric, folder)
        remove(pids[fault.victim])
    return trained


def train_with_an_absent_rank(fabric: Fabric, absent: int, step: int, folder: str) -> Trained:
    """One rank never comes to the backward pass of a step until the others have given up on it."""
    away = partial(wait_for_reports, folder, fabric.world - 1)
    trained = train(fabric, step, before_step=Strikes(absent, step, "forward", away), **ONE_EACH)
    if fabric.rank != absent:
        report_and_stay(fabric, folder)
    return trained


def remove(pid: int) -> None:
    """A stopped process would be waited for."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


# Endings


def train_until_interrupted(fabric: Fabric, folder: str) -> None:
    """Train for ever; leave a file named after this process once steps are being made."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    syncline.Sync(model, optimizer, fabric=fabric, **ONE_EACH)
    for step in range(1_000_000):
        optimizer.zero_grad()
        model(batch(fabric.rank, step)).square().mean().backward()
        optimizer.step()
        if step == 3:
            Path(folder, str(os.getpid())).touch()


def fail_in_backward(fabric: Fabric, rank: int, error: type[BaseException]) -> None:
    """A rank fails in the middle of its third backward pass, and nobody catches anything."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    syncline.Sync(model, optimizer, fabric=fabric, **ONE_EACH)
    for step in range(1, 6):
        if (fabric.rank, step) == (rank, 3):
            arm_between_buckets(model, optimizer, partial(fail, error))
        optimizer.zero_grad()
        model(batch(fabric.rank, step)).square().mean().backward()
        optimizer.step()


def fail(error: type[BaseException]) -> None:
    raise error("in the middle of backward")


def train_and_go_on_alone(fabric: Fabric) -> tuple[list[list[Tensor]], list[Tensor], int]:
    """Two steps together, two alone after `close`: parameters after each, what a model makes of the last two that was
    never synchronized, and how many hooks are left."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, **ONE_EACH)
    parameters = []
    for step in range(1, 5):
        if step == 3:
            sync.close()
            sync.close()
            alone = filled(Net())
            alone.load_state_dict(model.state_dict())
            other = torch.optim.SGD(alone.parameters(), lr=0.1)
        one_step(model, optimizer, batch(fabric.rank, step))
        if step > 2:
            one_step(alone, other, batch(fabric.rank, step))
        parameters.append(snapshot(model))
    return parameters, snapshot(alone), hooks_of(model, optimizer)


def hooks_of(model: nn.Module, optimizer: Optimizer) -> int:
    """How many hooks there are for steps and gradients."""
    of_parameters = [parameter._post_accumulate_grad_hooks or {} for parameter in model.parameters()]
    of_steps = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return sum(map(len, [*of_parameters, *of_steps]))


def one_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
