"""A bucket of parameters at a server: flat memory, and each parameter as a view of it.

Where workers share the machine the memory is a file without a name (memfd) that they map, so a pull is one copy, from
the server's parameters to the worker's. It is gone when the last process that has mapped it is.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from syncline.errors import OutOfSharedMemory
from syncline.path.bucket import Slot, view_of


class Shelf:
    """The parameters of one bucket, at their server."""

    def __init__(self, slots: Sequence[Slot], shared: bool) -> None:
        first = slots[0].parameter
        numel = sum(slot.parameter.numel() for slot in slots)
        self.descriptor = -1
        if shared and numel:
            self.descriptor, self.flat = make_shared(numel, first.dtype)
        else:
            self.flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self.parameters: dict[str, nn.Parameter] = {}
        start = 0
        for slot in slots:
            view = view_of(slot, self.flat[start : start + slot.parameter.numel()])
            view.copy_(slot.parameter.detach())
            self.parameters[slot.name] = nn.Parameter(view)
            start += slot.parameter.numel()

    def close(self) -> None:
        """The memory lives on as long as it is mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def make_shared(numel: int, dtype: torch.dtype) -> tuple[int, Tensor]:
    """Memory that another process of this user can map: its descriptor and a tensor over it."""
    descriptor = os.memfd_create("syncline parameters")
    try:
        os.posix_fallocate(descriptor, 0, numel * dtype.itemsize)
    except OSError as error:
        os.close(descriptor)
        raise OutOfSharedMemory(f"{numel * dtype.itemsize} bytes for parameters cannot be had: {error}") from error
    return descriptor, mapped(descriptor, numel, dtype)


def mapped(descriptor: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor over the memory behind a descriptor, which may be closed after that."""
    return torch.frombuffer(mmap.mmap(descriptor, numel * dtype.itemsize), dtype=dtype)


def map_of_another(process: int, descriptor: int, numel: int, dtype: torch.dtype) -> Tensor | None:
    """The same memory, from another process of this machine; None where that is not allowed."""
    try:
        own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        return mapped(own, numel, dtype)
    finally:
        os.close(own)
