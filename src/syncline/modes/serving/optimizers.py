"""The user's optimizers, at a server: the same kind with the same settings, over the parameters that live there."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from syncline.errors import PairingError
from syncline.replica.optimizer_steps import optimizers_in

Groups = list[list[dict[str, Any]]]  # the settings of every group of every optimizer


def groups_of(optimizers: Sequence[Optimizer]) -> Groups:
    """What a schedule may change from step to step."""
    return [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def refuse_unservable(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that cannot step at a server: it has no closure, and no optimizer inside another."""
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise PairingError(
                f"{type(optimizer).__name__} needs a closure, and a server, where this mode steps, has no batches to "
                f"compute one with; use another optimizer, or mode=sync"
            )
        for inner in optimizers_in(vars(optimizer).values()):
            raise PairingError(
                f"{type(optimizer).__name__} steps through another optimizer, {type(inner).__name__}, which would stay "
                f"with its worker when a server steps; give Sync an optimizer that steps by itself, or use mode=sync"
            )


def moved(optimizers: Sequence[Optimizer], places: Mapping[Any, nn.Parameter]) -> list[Optimizer]:
    """Optimizers like these over other tensors; parameters that have no other place are left out."""
    return [moved_one(optimizer, places) for optimizer in optimizers]


def moved_one(optimizer: Optimizer, places: Mapping[Any, nn.Parameter]) -> Optimizer:
    """The same optimizer with groups and state of its own; hooks and wrappers of its step stay behind."""
    twin = object.__new__(type(optimizer))  # copy.copy() would leave out attributes of the user's
    vars(twin).update(vars(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            setattr(twin, name, OrderedDict())
    vars(twin).pop("step", None)  # of a scheduler, or of Sync
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [places[p] for p in group["params"] if p in places]} for group in optimizer.param_groups
    ]
    return twin


def adopt_groups(optimizers: Sequence[Optimizer], groups: Groups, factor: float) -> None:
    """Follow the settings of a worker, with its learning rates times a factor."""
    for optimizer, settings in zip(optimizers, groups, strict=True):
        for group, wanted in zip(optimizer.param_groups, settings, strict=True):
            group.update({key: value for key, value in wanted.items() if key != "params"})
            group["lr"] = float(group["lr"]) * factor
