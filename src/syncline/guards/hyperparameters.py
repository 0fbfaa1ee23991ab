"""Hyperparameters of optimizers. They must be equal on all ranks, or equal gradients become different steps.

What is compared is plain data: numbers, text, sequences of them, and tensors by value. Callables and other objects that
a parameter group may hold are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from numbers import Real
from operator import is_

from torch import Tensor
from torch.optim import Optimizer

from syncline.core.ranks import some_ranks
from syncline.errors import ReplicasDiverged
from syncline.fabric.base import Fabric
from syncline.replicas import all_have, gather_texts

PARAMETERS = "params"  # the one key of a parameter group that is no hyperparameter
MOST_VALUES = 64  # of a tensor that is a hyperparameter
ABSENT = "not there"


class Hyperparameters:
    """The hyperparameters of some optimizers, and a digest that is made anew only when one of them has changed."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.seen: list[object] = []
        self.is_fixed = False  # all that was seen cannot change in place
        self.last_digest = b""

    def digest(self) -> bytes:
        """Eight bytes that depend on every hyperparameter."""
        values = [
            value for optimizer in self.optimizers for group in optimizer.param_groups for value in group.values()
        ]
        if not (self.is_fixed and len(values) == len(self.seen) and all(map(is_, values, self.seen))):
            self.seen = values
            self.is_fixed = all(map(is_immutable, self.values()))
            self.last_digest = hashlib.blake2b(repr(describe(self.optimizers)).encode(), digest_size=8).digest()
        return self.last_digest

    def values(self) -> list[object]:
        """All but the parameters."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [value for group in groups for key, value in group.items() if key != PARAMETERS]


def describe(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Every hyperparameter by name, with its value as text."""
    found = {}
    for number, optimizer in enumerate(optimizers):
        whose = f"optimizer {number} ({type(optimizer).__name__})"
        for position, group in enumerate(optimizer.param_groups):
            found[f"the number of parameters in group {position} of {whose}"] = str(len(group[PARAMETERS]))
            for key, value in group.items():
                if key != PARAMETERS and (text := text_of(value)) is not None:
                    found[f"{key} in group {position} of {whose}"] = text
    return found


def describe_optimizers(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> list[str]:
    """What ranks must have in common in their optimizers, one line for each thing; `names` of parameters are by id."""
    lines = [f"optimizer {number} is {type(optimizer).__qualname__}" for number, optimizer in enumerate(optimizers)]
    lines += [f"{name}: {text}" for name, text in describe(optimizers).items()]
    for number, optimizer in enumerate(optimizers):
        for position, group in enumerate(optimizer.param_groups):
            mine = [names.get(id(parameter), "of no model here") for parameter in group[PARAMETERS]]
            lines += [f"optimizer {number} group {position} parameter {name}" for name in mine]
    return lines


def compare_hyperparameters(fabric: Fabric, found: Mapping[str, str], when: str) -> None:
    """Raise `ReplicasDiverged` on every rank, with name, values and ranks, unless all have the same."""
    text = "\n".join(f"{name}\t{value}" for name, value in found.items())
    if all_have(fabric, text):
        return
    told = [dict(line.split("\t", 1) for line in theirs.splitlines()) for theirs in gather_texts(fabric, text)]
    apart = {}
    for name in dict.fromkeys(name for theirs in told for name in theirs):
        values = [theirs.get(name, ABSENT) for theirs in told]
        if len(set(values)) > 1:
            apart[name] = values
    raise ReplicasDiverged(difference(apart, when))


def difference(apart: Mapping[str, Sequence[str]], when: str) -> str:
    """The first hyperparameter that differs, with the values that ranks have."""
    name, values = next(iter(apart.items()))
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    sides = ", and ".join(f"{value} on {some_ranks(who)}" for value, who in ranks.items())
    return (
        f"hyperparameters differ {when}: {name} is {sides}; it is the first of {len(apart)} that do. Equal gradients "
        f"would become different steps. Set it alike on all ranks, step schedulers equally often, and give "
        f"ReduceLROnPlateau a loss that is the mean over ranks; divergence_guard=False lets ranks differ"
    )


def text_of(value: object) -> str | None:
    """Plain data as text that is the same for equal values; None of anything else."""
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, Tensor):
        return repr(value.tolist()) if value.numel() <= MOST_VALUES and value.device.type == "cpu" else None
    if isinstance(value, list | tuple):
        texts = [text_of(one) for one in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return None


def is_immutable(value: object) -> bool:
    """Whether a value stays as it is while it is the same object."""
    if isinstance(value, tuple):
        return all(map(is_immutable, value))
    return not isinstance(value, list | Tensor)
