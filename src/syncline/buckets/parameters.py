"""The parameters to synchronize: their names and order, the same on every rank, and what is sparse among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from syncline.errors import ConfigError
from syncline.fabric.base import DTYPES, name_of

Named = list[tuple[str, nn.Parameter]]
claimed = WeakIdKeyDictionary()  # parameters that are synchronized


def parameters_of(model: nn.Module) -> Named:
    """Every parameter once, in order of registration; a tied one under its first name."""
    return [(name.removeprefix("_orig_mod."), parameter) for name, parameter in model.named_parameters()]


def sparse_names(model: nn.Module) -> set[str]:
    """Parameters whose gradients are sparse tensors."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            found.add(f"{name}.weight".removeprefix(".").removeprefix("_orig_mod."))
    return found


def check_parameters(model: nn.Module, named: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Refuse what cannot be synchronized, by name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and device.type == "cpu":
            raise ConfigError(
                f"{name} is torch's SyncBatchNorm, which needs a GPU; use syncline.convert_batch_norm(model)"
            )
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in DTYPES:
            known = ", ".join(name_of(dtype) for dtype in DTYPES)
            raise ConfigError(f"{name} is {name_of(parameter.dtype)}; gradients can be of {known}")
        if parameter.device.type != device.type:
            raise ConfigError(
                f"{name} is on {parameter.device}, but the ranks of this fabric talk from {device.type} memory; "
                f"move the model with model.to({device.type!r}), or join with another backend"
            )


class Claim:
    """To parameters that nobody else synchronizes: their gradients can be in one bucket only."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    @contextmanager
    def of(self, named: Named) -> Iterator[None]:
        """Held from here on, unless what is inside fails."""
        for name, parameter in named:
            if parameter in claimed:
                raise ConfigError(
                    f"{name} is synchronized by another Sync already; close() that one first, or make one Sync of all "
                    f"models that share it, in an nn.ModuleList"
                )
        self.parameters = [parameter for _, parameter in named]
        for parameter in self.parameters:
            claimed[parameter] = True
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Others may have them."""
        for parameter in self.parameters:
            del claimed[parameter]
        self.parameters = []


def describe_layout(named: Named, buffers: Iterable[tuple[str, Tensor]], settings: Iterable[str]) -> list[str]:
    """What ranks must have in common, one line for each thing."""
    lines = list(settings)
    for name, parameter in named:
        frozen = "" if parameter.requires_grad else " frozen"
        lines.append(f"parameter {name} {name_of(parameter.dtype)}{list(parameter.shape)}{frozen}")
    for name, buffer in buffers:
        lines.append(f"buffer {name} {name_of(buffer.dtype)}{list(buffer.shape)}")
    return lines
