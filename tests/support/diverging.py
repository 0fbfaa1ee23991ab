"""Ordinary mistakes after which replicas are not equal any more. Light: ranks import it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import syncline
from support.batches import Batch
from support.losses import squared
from support.models import mlp
from support.trainees import ADAM, Trainee
from syncline.errors import SynclineError
from syncline.modes.gradients import GradientDriver

AT = 4  # the step before which something happens
CULPRIT = 1


class Narrow(nn.Sequential):
    """Computes in 16 bits, and so do its gradients and the verdict that travels with them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).double()


def narrow() -> Narrow:
    return Narrow(*mlp(torch.bfloat16))


class Outcome(NamedTuple):
    """What became of a rank."""

    error: str
    message: str
    steps: int  # that were made
    comparisons: int  # of whole replicas
    place: Tensor


Happens = Callable[[Trainee, int], None]  # before every step


def train_while(
    fabric: syncline.Fabric, happens: Happens, mode: str = "sync", steps: int = 10, **settings: Any
) -> Outcome:
    """Train while something happens, until the first error."""
    error: SynclineError | None = None
    trainee = Trainee(fabric, mode, **({"optimizer": ADAM} | settings))
    try:
        for step in range(steps):
            happens(trainee, step)
            trainee.step()
    except SynclineError as raised:
        error = raised
    driver = getattr(trainee.sync.driver, "gradients", trainee.sync.driver)
    guard = driver.guard if isinstance(driver, GradientDriver) else None
    comparisons = guard.comparisons if guard is not None else 0
    if error is None:
        trainee.sync.close()
    return Outcome(type(error).__name__ if error else "", str(error or ""), trainee.done, comparisons, trainee.place())


# On one rank only


def is_due(trainee: Trainee, step: int) -> bool:
    return step == AT and trainee.fabric.rank == CULPRIT


def weights_are_loaded(trainee: Trainee, step: int) -> None:
    if is_due(trainee, step):
        load_weights(trainee)


def load_weights(trainee: Trainee, value: float = 0.25) -> None:
    saved = {name: torch.full_like(weights, value) for name, weights in trainee.model.state_dict().items()}
    trainee.model.load_state_dict(saved)


def one_layer_is_loaded(trainee: Trainee, step: int) -> None:
    if is_due(trainee, step):
        layer = trainee.model[2]
        layer.load_state_dict({name: weights + 1 for name, weights in layer.state_dict().items()})


def optimizer_state_is_loaded(trainee: Trainee, step: int) -> None:
    if is_due(trainee, step):
        saved = copy.deepcopy(trainee.optimizer.state_dict())
        for state in saved["state"].values():
            state["exp_avg"] += 1
        trainee.optimizer.load_state_dict(saved)


def optimizer_state_is_edited(trainee: Trainee, step: int) -> None:
    if is_due(trainee, step):
        trainee.optimizer.state[trainee.model[2].bias]["exp_avg"].zero_()


def optimizer_state_is_cleared(trainee: Trainee, step: int) -> None:
    if is_due(trainee, step):
        trainee.optimizer.state.clear()


def optimizer_is_fresh_on_others(trainee: Trainee, step: int) -> None:
    """One rank loads the state of an earlier run, all others begin."""
    if step == 0 and trainee.fabric.rank == CULPRIT:
        other = mlp()
        optimizer = ADAM(other.parameters())
        for parameter in other.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        trainee.optimizer.load_state_dict(optimizer.state_dict())


def a_weight_is_edited(trainee: Trainee, step: int) -> None:
    if is_due(trainee, step):
        with torch.no_grad():
            trainee.model[2].bias[1] += 0.5


def data_is_edited(trainee: Trainee, step: int) -> None:
    if is_due(trainee, step):
        trainee.model[2].bias.data[1] += 0.5


def rate_is_lowered(trainee: Trainee, step: int) -> None:
    if is_due(trainee, step):
        trainee.optimizer.param_groups[0]["lr"] *= 0.5


def betas_are_changed(trainee: Trainee, step: int) -> None:
    if is_due(trainee, step):
        trainee.optimizer.param_groups[0]["betas"] = (0.5, 0.999)


class Plateau:
    """Every rank lowers its rate by its own loss."""

    def __init__(self) -> None:
        self.schedulers: dict[int, ReduceLROnPlateau] = {}

    def __call__(self, trainee: Trainee, step: int) -> None:
        rank = trainee.fabric.rank
        scheduler = self.schedulers.setdefault(rank, ReduceLROnPlateau(trainee.optimizer, patience=1))
        scheduler.step(float(step if rank == CULPRIT else -step))


class ScheduleIsLoaded:
    """One rank goes on from the state of its schedule, and the others begin it anew."""

    def __init__(self) -> None:
        self.schedulers: dict[int, StepLR] = {}

    def __call__(self, trainee: Trainee, step: int) -> None:
        rank = trainee.fabric.rank
        scheduler = self.schedulers.setdefault(rank, StepLR(trainee.optimizer, step_size=4))
        if step == 0 and rank == CULPRIT:
            scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": 2})
        elif step:
            scheduler.step()


# On all ranks alike


def nothing(trainee: Trainee, step: int) -> None:
    pass


def all_load_the_same(trainee: Trainee, step: int) -> None:
    if step == AT:
        load_weights(trainee)
        trainee.optimizer.load_state_dict(copy.deepcopy(trainee.optimizer.state_dict()))


def all_load_others(trainee: Trainee, step: int) -> None:
    if step == AT:
        load_weights(trainee, value=0.25 + trainee.fabric.rank)


def all_clamp(trainee: Trainee, step: int) -> None:
    with torch.no_grad():
        for parameter in trainee.model.parameters():
            parameter.clamp_(-0.3, 0.3)


def all_load_every_step(trainee: Trainee, step: int) -> None:
    trainee.model.load_state_dict(copy.deepcopy(trainee.model.state_dict()))
    trainee.optimizer.load_state_dict(copy.deepcopy(trainee.optimizer.state_dict()))


def one_swaps_its_weights_and_back(trainee: Trainee, step: int) -> None:
    """As who evaluates a running mean of them, on one rank."""
    if trainee.fabric.rank == CULPRIT:
        saved = copy.deepcopy(trainee.model.state_dict())
        load_weights(trainee)
        trainee.model.load_state_dict(saved)


def all_lower_the_rate(trainee: Trainee, step: int) -> None:
    trainee.optimizer.param_groups[0]["lr"] *= 0.9


# With other optimizers from the start

OPTIMIZERS: dict[str, Callable[[int], Callable[..., torch.optim.Optimizer]]] = {
    "lr": lambda rank: lambda p: torch.optim.SGD(p, lr=0.1 + 0.1 * (rank == CULPRIT)),
    "weight_decay": lambda rank: lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1 * (rank == CULPRIT)),
    "class": lambda rank: lambda p: (torch.optim.Adam if rank == CULPRIT else torch.optim.RAdam)(p, lr=0.1),
    "groups": lambda rank: lambda p: torch.optim.SGD(grouped(list(p), 2 if rank == CULPRIT else 3), lr=0.1),
    "tensor": lambda rank: lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1 + (rank == CULPRIT)), foreach=False),
}


def grouped(parameters: list[Tensor], first: int) -> list[dict[str, Any]]:
    return [{"params": parameters[:first]}, {"params": parameters[first:]}]


def counted_alone(trainee: Trainee, step: int) -> None:
    """All optimizers also count in a plain number; one loads another one."""
    for state in trainee.optimizer.state.values():
        state.setdefault("count", 7)
    if is_due(trainee, step):
        saved = copy.deepcopy(trainee.optimizer.state_dict())
        saved["state"][2]["count"] = 8
        trainee.optimizer.load_state_dict(saved)


def start_with_used_optimizers(fabric: syncline.Fabric, mode: str) -> str:
    """One rank has loaded the state of its optimizer before Sync, and the others have not."""
    model = mlp()
    optimizer = ADAM(model.parameters())
    if fabric.rank == CULPRIT:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    try:
        for step in range(3):
            optimizer.zero_grad()
            squared(model, Batch(fabric.rank, step)).backward()
            optimizer.step()
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def start_with_one_scaler(fabric: syncline.Fabric, mode: str) -> str:
    try:
        Trainee(fabric, mode, scale=1024.0 * (fabric.rank == CULPRIT)).sync.close()
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def start_with_other_optimizers(fabric: syncline.Fabric, what: str, mode: str, **settings: Any) -> str:
    try:
        Trainee(fabric, mode, OPTIMIZERS[what](fabric.rank), **settings).sync.close()
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return ""
