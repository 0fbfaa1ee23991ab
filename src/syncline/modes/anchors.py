"""Where ranks met last, and where they go from there.

An anchor is the place of a parameter at the last meeting, the same on all ranks. What ranks say is how far they have
come from it, and an outer optimizer moves it. Without one, parameters themselves are averaged, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from syncline.modes.outer import Outer
from syncline.path.bucket import Slot


class Anchors:
    """Those of one rank, in at least 32 bits."""

    def __init__(self, outer: Outer | None) -> None:
        self.outer = outer
        self.places: dict[str, Tensor] = {}  # by parameter

    @torch.no_grad()
    def drop(self, slots: Iterable[Slot]) -> None:
        """Here all ranks are equal, and here they will be compared with."""
        if self.outer is None:
            return
        for slot in slots:
            wide = torch.promote_types(slot.parameter.dtype, torch.float32)
            self.places[slot.name] = slot.parameter.detach().to(wide, copy=True)

    def fill(self, slot: Slot) -> None:
        """What this rank contributes: where it is, or how far it has come."""
        if self.outer is None:
            slot.view.copy_(slot.parameter)
        else:
            torch.sub(self.places[slot.name], slot.parameter, out=slot.view)

    def moved(self, name: str, mean: Tensor, rate: float) -> Tensor:
        """Where ranks go, given the mean of what they said; `rate` is that of the inner optimizer."""
        if self.outer is None:
            return mean
        self.outer.step(name, self.places[name], mean, rate)
        return self.places[name]

    def state_dict(self) -> dict[str, Any]:
        """Places and momenta."""
        momenta = self.outer.momenta if self.outer is not None else {}
        return {"anchors": copied(self.places), "momenta": copied(momenta)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there."""
        self.places = copied(saved["anchors"])
        if self.outer is not None:
            self.outer.momenta = copied(saved["momenta"])


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With memory of their own."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
