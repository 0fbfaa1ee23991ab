"""A hook that belongs to one model, and is not copied or saved with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn


class ForwardHook:
    """Called before every forward pass of a model.

    Copies of the model (`deepcopy`, `AveragedModel`, `torch.save`) belong to no `Sync`: they are evaluated alone and
    talk to no rank. In them a call of the standard library that does nothing has the place of this one, so that a file
    can be read where there is no Syncline.
    """

    def __init__(self, model: nn.Module, call: Callable[[], None]) -> None:
        self.call = call
        self.handle = model.register_forward_pre_hook(self)

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.call()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    def remove(self) -> None:
        """The model is called as before."""
        self.handle.remove()
