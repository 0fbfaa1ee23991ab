"""The user's optimizers, at a server: the same kind with the same settings, over the parameters that live there."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import ConfigError, PairingError
from syncline.guards.claims import claimed
from syncline.path.bucket import Slot
from syncline.replica.optimizer_steps import optimizers_in

Groups = list[list[dict[str, Any]]]  # the settings of every group of every optimizer


def groups_of(optimizers: Sequence[Optimizer]) -> Groups:
    """What a schedule may change from step to step."""
    return [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def refuse_wrappers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that has another one inside: at a server the inner one would step with a worker's tensors."""
    for optimizer in optimizers:
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


class ServedGroups:
    """The groups of a worker's optimizers, which are those that servers were set up with, or nobody would follow."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.members = members_of(optimizers)
        self.is_checked = False

    def check(self, names: Mapping[int, str]) -> None:
        """Before a step; parameters of the model have names by id."""
        for then, now in zip(self.members, members_of(self.optimizers), strict=True):
            if list(map(len, then)) != list(map(len, now)) or any(map(differ, then, now)):
                raise ConfigError(
                    f"{what_came(then, now, names)} after servers were set up, and they would not follow; make the "
                    f"groups before Sync (with lr=0 for what is to be trained later), or close() this Sync and make "
                    f"another"
                )
        if not self.is_checked:
            self.refuse_unserved(names)
            self.is_checked = True

    def refuse_unserved(self, names: Mapping[int, str]) -> None:
        """Servers move what a `Sync` has, and a worker's own optimizer moves nothing."""
        everything = (parameter for optimizer in self.members for group in optimizer for parameter in group)
        if strangers := [p for p in everything if p.requires_grad and p not in claimed]:
            raise ConfigError(
                f"the optimizer has {some_of(strangers, names)}, in no model with a Sync: no server has that, so it "
                f"would never move; put all models in one Sync, as an nn.ModuleList, or give it an optimizer of its own"
            )


def what_came(then: Sequence[Sequence[Tensor]], now: Sequence[Sequence[Tensor]], names: Mapping[int, str]) -> str:
    """How the groups of an optimizer have changed."""
    known = {id(parameter) for group in then for parameter in group}
    if added := [parameter for group in now for parameter in group if id(parameter) not in known]:
        return f"{some_of(added, names)} came to the optimizer"
    return f"groups of {list(map(len, then))} parameters in the optimizer became others, of {list(map(len, now))},"


def members_of(optimizers: Sequence[Optimizer]) -> list[list[list[Tensor]]]:
    """The parameters of every group of every optimizer."""
    return [[[*group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]


def differ(then: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Whether these are other tensors."""
    return any(one is not other for one, other in zip(then, now, strict=True))


def some_of(parameters: Sequence[Tensor], names: Mapping[int, str]) -> str:
    """The first of some parameters, by name where it has one, and how many there are."""
    first = names.get(id(parameters[0]), f"a parameter of shape {list(parameters[0].shape)}")
    return first if len(parameters) == 1 else f"{first} and {len(parameters) - 1} more"


def refuse_shared_memory(slots: Sequence[Slot]) -> None:
    """A server would have two parameters where workers have one, and move both."""
    first: dict[int, str] = {}
    for slot in slots:
        place = slot.parameter.data_ptr()
        if place and first.setdefault(place, slot.name) != slot.name:
            raise ConfigError(
                f"{slot.name} and {first[place]} are two parameters in the same memory (one.data = other.data?), of "
                f"which servers would have two copies; make them one parameter, with one.weight = other.weight"
            )
