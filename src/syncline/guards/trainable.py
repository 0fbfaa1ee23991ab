"""Parameters and optimizers that cannot be synchronized, refused by name wherever they are given."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import Parameter, signature
from itertools import chain

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from syncline.errors import ConfigError, PairingError
from syncline.fabric.calls import DTYPES, name_of


def refuse_lazy(module: nn.Module, prefix: str = "") -> None:
    """Parameters and buffers of lazy modules have no shape before the first batch."""
    for name, tensor in chain(module.named_parameters(prefix), module.named_buffers(prefix)):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} is of a lazy module and has no shape yet; let the model see one batch, on every rank, before "
                f"it and its optimizer are given to Syncline"
            )


def refuse_dtype(name: str, parameter: Tensor) -> None:
    """Gradients are added up as real numbers."""
    if parameter.dtype not in DTYPES:
        known = ", ".join(name_of(dtype) for dtype in DTYPES)
        hint = "; keep two real parameters and use torch.view_as_complex in forward" if parameter.is_complex() else ""
        raise ConfigError(f"{name} is {name_of(parameter.dtype)}; gradients can be of {known}{hint}")


def has_sparse_gradient(module: nn.Module) -> bool:
    """Whether the gradient of a module's weight is a sparse tensor."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def refuse_closures(optimizers: Iterable[Optimizer], mode: str) -> None:
    """Somebody else than the user's loop makes steps in some modes, and has no closure to give."""
    for optimizer in optimizers:
        closure = signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            raise PairingError(
                f"{type(optimizer).__name__} evaluates a closure in its step, which mode={mode} cannot do for it: it "
                f"steps where there is no batch; use mode=sync"
            )
