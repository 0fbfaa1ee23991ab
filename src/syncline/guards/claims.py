"""Parameters that are synchronized, and nobody else who averages the same gradients.

A gradient can be in one bucket only. Who else could have it is another `Sync`, which is found in `claimed`, or a
DistributedDataParallel, of which torch keeps no list: those are found among the objects of this process, which takes
some 10 ms. That is done when a `Sync` is made, and in its first step for those that were made in between.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from syncline.errors import ConfigError

Strides = tuple[int, ...]
claimed = WeakIdKeyDictionary()  # parameters that are synchronized: the strides of each, which ranks have compared
claiming = Lock()  # ranks may be threads


class Claim:
    """To parameters that nobody else synchronizes: their gradients can be in one bucket only."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    @contextmanager
    def of(self, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[None]:
        """Held from here on, unless what is inside fails."""
        refuse_ddp(named)
        with claiming:
            refuse_claimed(named)
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
        with claiming:
            for parameter in self.parameters:
                del claimed[parameter]
        self.parameters = []


def refuse_claimed(named: Iterable[tuple[str, Tensor]]) -> None:
    """Another `Sync` has a parameter, or one in the same memory, as after `one.data = other.data`."""
    places = {parameter.data_ptr() for parameter in claimed} - {0}
    for name, parameter in named:
        if parameter in claimed or parameter.data_ptr() in places:
            raise ConfigError(
                f"{name} is synchronized by another Sync already; close() that one first, or make one Sync of all "
                f"models that share it, in an nn.ModuleList. A Sync that is out of reach and was not closed goes on "
                f"as long as its parameters are there: make the model anew"
            )


def refuse_ddp(named: Iterable[tuple[str, Tensor]]) -> None:
    """A DistributedDataParallel averages the gradient of a parameter too: ranks would come apart."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):  # which DDP needs
        return
    names = {id(parameter): name for name, parameter in named if parameter.requires_grad}
    if in_ddp(names):
        gc.collect()  # a DDP that nobody has any more may not be gone yet
    if found := in_ddp(names):
        raise ConfigError(
            f"{found} is in a DistributedDataParallel, which averages its gradient too, so ranks would come apart. Use "
            f"one of the two: give Sync the plain model and call that, or let DDP have it alone, with codecs by "
            f"syncline.integrations.ddp.attach()"
        )


def in_ddp(names: dict[int, str]) -> str:
    """The first of some parameters, named by id, that a DistributedDataParallel of this process has; empty if none."""
    kinds = {DistributedDataParallel, *DistributedDataParallel.__subclasses__()}
    wrappers = (one for one in gc.get_referrers(*kinds) if type(one) in kinds)
    held = (parameter for wrapper in wrappers for parameter in averaged_by(wrapper))
    return next((names[id(parameter)] for parameter in held if id(parameter) in names), "")


def averaged_by(wrapper: DistributedDataParallel) -> Iterator[nn.Parameter]:
    """Parameters whose gradients a DistributedDataParallel averages."""
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    for module in wrapper.children():
        yield from (parameter for name, parameter in module.named_parameters() if name not in ignored)


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
