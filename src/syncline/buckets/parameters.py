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
Strides = tuple[int, ...]
claimed = WeakIdKeyDictionary()  # parameters that are synchronized: the strides of each, which ranks have compared


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


def dense_strides(tensor: Tensor) -> Strides:
    """Strides of a tensor in flat memory without gaps: its own, or where these leave gaps those of a contiguous one.

    The stride of a dimension of size 1 means nothing, and is that of a contiguous tensor too.
    """
    contiguous = torch.empty(tensor.shape, device="meta").stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.is_contiguous() or extent != tensor.numel():
        return contiguous
    sizes = zip(tensor.shape, tensor.stride(), contiguous, strict=True)
    return tuple(plain if size == 1 else own for size, own, plain in sizes)


def strides_of(parameter: Tensor) -> Strides:
    """Strides of a parameter and its gradient on their way: what ranks compared, whatever it was converted to since."""
    strides: Strides = claimed[parameter] if parameter in claimed else dense_strides(parameter)
    return strides


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
            claimed[parameter] = dense_strides(parameter)
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
        lines.append(f"parameter {name} {describe(parameter)}{describe_strides(parameter)}{frozen}")
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
