"""The parameters to synchronize: their names and order, the same on every rank, and what is sparse among them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from syncline.errors import ConfigError
from syncline.fabric.calls import name_of
from syncline.guards.claims import strides_of
from syncline.guards.trainable import has_sparse_gradient, refuse_dtype, refuse_lazy

Named = list[tuple[str, nn.Parameter]]
SHARDS = {"FullyShardedDataParallel", "FSDPModule"}  # classes of modules; importing them takes long


def parameters_of(model: nn.Module) -> Named:
    """Every parameter once, in order of registration; a tied one under its first name."""
    return [(name.removeprefix("_orig_mod."), parameter) for name, parameter in model.named_parameters()]


def sparse_names(model: nn.Module) -> set[str]:
    """Parameters whose gradients are sparse tensors."""
    found = set()
    for name, module in model.named_modules():
        if has_sparse_gradient(module):
            found.add(f"{name}.weight".removeprefix(".").removeprefix("_orig_mod."))
    return found


def check_parameters(model: nn.Module, named: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Refuse what cannot be synchronized, by name."""
    refuse_lazy(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and device.type == "cpu":
            raise ConfigError(
                f"{name} is torch's SyncBatchNorm, which needs a GPU; use syncline.convert_batch_norm(model)"
            )
        if SHARDS & {kind.__name__ for kind in type(module).__mro__}:
            raise ConfigError(
                f"{name or 'the model'} is sharded by FSDP, which averages gradients itself; give Sync the plain model"
            )
    for name, parameter in named:
        if type(parameter).__name__ == "DTensor":
            raise ConfigError(f"{name} is a DTensor, of which each rank has a part; Sync needs whole parameters")
        if not parameter.requires_grad:
            continue
        refuse_dtype(name, parameter)
        if parameter.device.type != device.type:
            raise ConfigError(
                f"{name} is on {parameter.device}, but the ranks of this fabric talk from {device.type} memory; "
                f"move the model with model.to({device.type!r}), or join with another backend"
            )


def describe_layout(named: Named, buffers: Iterable[tuple[str, Tensor]], settings: Iterable[str]) -> list[str]:
    """What ranks must have in common, one line for each thing."""
    lines = list(settings)
    first: dict[int, str] = {0: ""}  # parameter in each place of memory
    for name, parameter in named:
        frozen = "" if parameter.requires_grad else " frozen"
        shared = first.setdefault(parameter.data_ptr(), name)
        tied = f" in the memory of {shared}" if shared not in ("", name) else ""
        lines.append(f"parameter {name} {describe(parameter)}{describe_strides(parameter)}{frozen}{tied}")
    for name, buffer in buffers:
        lines.append(f"buffer {name} {describe(buffer)}")
    return lines


def describe(tensor: Tensor) -> str:
    """The dtype, shape and kind of device of a tensor."""
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{name_of(tensor.dtype)}{list(tensor.shape)}{device}"


def describe_strides(parameter: Tensor) -> str:
    """The memory format of a parameter, where it is not contiguous: elements are added up where they are in memory."""
    strides = strides_of(parameter)
    is_contiguous = strides == torch.empty(parameter.shape, device="meta").stride()
    return "" if is_contiguous else f" strides {list(strides)}"
