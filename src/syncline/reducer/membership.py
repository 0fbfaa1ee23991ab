"""Parameters that nobody keeps in step, because they came after `Sync` was made: they would differ between ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from syncline.errors import ConfigError
from syncline.guards.claims import claimed, refuse_ddp
from syncline.path.bucket import Slot
from syncline.reducer.parameters import parameters_of

log = logging.getLogger(__name__)


class Membership:
    """Of the parameters of a model, which are to be those that its `Sync` was made with."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # how many parameters each had

    def check(self, optimizer: Optimizer) -> None:
        """Before its step. All are looked at in the first one, and when there are more or fewer than before."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self.seen.get(optimizer) == count:
            return
        if not self.seen:
            refuse_ddp(parameters_of(self.model))
        self.seen[optimizer] = count
        strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in claimed]
        own = {id(parameter): name for name, parameter in parameters_of(self.model)}
        for stranger in strangers:
            if id(stranger) in own:
                raise ConfigError(
                    f"{own[id(stranger)]} came to the model and the optimizer after this Sync was made, so ranks would "
                    f"not average its gradient; close() this Sync and make another"
                )
        if any(stranger.requires_grad for stranger in strangers):
            log.warning(
                "the optimizer also changes %d parameters, the first of shape %s, that are in no model with a Sync: "
                "they will differ between ranks; put all models in one Sync, as an nn.ModuleList, if that is not meant",
                len(strangers),
                list(strangers[0].shape),
            )

    def refuse_replaced(self, slots: Iterable[Slot]) -> None:
        """Of parameters that had no gradient, those whose place another one has taken."""
        for slot in slots:
            if not self.is_there(slot):
                raise ConfigError(
                    f"{slot.name} is not the parameter any more that it was when this Sync was made (a new layer, or "
                    f"load_state_dict(assign=True)?), so ranks would not average its gradient; close() this Sync and "
                    f"make another, with an optimizer for the new one"
                )

    def is_there(self, slot: Slot) -> bool:
        """Whether the model has the parameter under its name."""
        try:
            return self.model.get_parameter(slot.name) is slot.parameter
        except AttributeError:
            return False
