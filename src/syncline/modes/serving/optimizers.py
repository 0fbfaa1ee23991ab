"""The user's optimizers, at a server: the same kind with the same settings, over the parameters that live there."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

Groups = list[list[dict[str, Any]]]  # the settings of every group of every optimizer


def groups_of(optimizers: Sequence[Optimizer]) -> Groups:
    """What a schedule may change from step to step."""
    return [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def moved(optimizers: Sequence[Optimizer], places: Mapping[Any, nn.Parameter]) -> list[Optimizer]:
    """Optimizers like these over other tensors; parameters that have no other place are left out."""
    return [moved_one(optimizer, places) for optimizer in optimizers]


def moved_one(optimizer: Optimizer, places: Mapping[Any, nn.Parameter]) -> Optimizer:
    """All that an optimizer is lies in its groups and its state; hooks and wrappers of its step stay behind."""
    twin = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            setattr(twin, name, OrderedDict())
    vars(twin).pop("step", None)  # of a scheduler
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
