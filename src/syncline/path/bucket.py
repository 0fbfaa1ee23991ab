"""A bucket: gradients that travel together, as views of one flat buffer in memory that the fabric can reach.

    gradient 0 | gradient 1 | ... | gradient k

Nothing else is in it: what ranks must know of a pass travels in its status (`core/status.py`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor, nn

from syncline.core.torch_internals import count_tensors
from syncline.errors import ConfigError
from syncline.fabric.base import Fabric
from syncline.fabric.calls import name_of
from syncline.guards.claims import strides_of
from syncline.path.holders import count_references, warn_of_blindness
from syncline.path.placing import SMALL_BYTES, put

NOT_SEEN = 1 << 30  # gradients: more than come in any pass, so a bucket waits for its end


class Slot:
    """One parameter's place in a bucket, and what has happened to its gradient in this pass."""

    __slots__ = (
        "bucket",
        "expected",
        "fired",
        "is_divided",
        "is_small",
        "is_sparse",
        "name",
        "parameter",
        "strides",
        "view",
    )

    view: Tensor
    bucket: Bucket

    def __init__(self, name: str, parameter: nn.Parameter, is_sparse: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.is_sparse = is_sparse  # then it has no bucket
        self.strides = strides_of(parameter)  # of its gradient in the bucket, the same on all ranks
        self.is_small = parameter.nbytes <= SMALL_BYTES
        self.fired = 0  # gradients that came in this pass
        self.is_divided = False  # by the number of ranks, in this pass
        self.expected = NOT_SEEN  # that come in a pass; several where parts of the graph have a backward of their own

    def place(self) -> None:
        """See that the gradient is in the bucket, and is what the optimizer will find."""
        if self.is_outside():
            self.bucket.copy_in([self])

    def learn(self) -> None:
        """How many gradients come in a pass, at the end of the first that had any."""
        if self.fired and self.expected == NOT_SEEN:
            self.expected = self.fired

    def is_outside(self) -> bool:
        """Whether there is a gradient that is not yet in the bucket as it will be sent."""
        gradient = self.parameter.grad
        if gradient is None or self.is_divided:
            return False
        return gradient is not self.view or self.bucket.divisor != 1


class BucketBuffer:
    """The memory of a bucket for one pass. There are two where the next pass begins before this one has arrived."""

    def __init__(self, fabric: Fabric, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        self.values = fabric.buffer(sum(slot.parameter.numel() for slot in slots), dtype)
        self.finite: bool | None = None  # whether the means are, where somebody has seen it
        self.views: list[Tensor] = []
        start = 0
        for slot in slots:
            self.views.append(view_of(slot, self.values[start : start + slot.parameter.numel()]))
            start += slot.parameter.numel()
        self.tensors = count_tensors(self.values)  # on this memory, as long as nobody else holds it
        self.places = [(view.data_ptr(), view.storage_offset(), view.shape, view.stride()) for view in self.views]

    def renew_views(self) -> bool:
        """Make those anew that are elsewhere by now: `parameter.grad.data = ...` moves the very tensor. Any?"""
        moved = [number for number, view in enumerate(self.views) if view.data_ptr() != self.places[number][0]]
        for number in moved:
            _, offset, shape, strides = self.places[number]
            self.views[number] = self.values.as_strided(shape, strides, offset)
        return bool(moved)


class Bucket:
    """Gradients that travel together."""

    def __init__(
        self,
        fabric: Fabric,
        number: int,
        slots: Sequence[Slot],
        buffers: int = 1,
        dtype: torch.dtype | None = None,
        divisor: int = 1,
    ) -> None:
        self.number = number  # the order in which buckets leave
        self.slots = slots
        self.small = [slot for slot in slots if slot.is_small]
        self.missing = 0  # gradients that are still to come
        self.divisor = divisor  # of gradients on their way in, where the fabric only adds
        self.finite: bool | None = True  # whether all that was divided is; None where nobody has looked
        self.present = [1] * len(slots)  # whether this rank has a gradient of each, in this pass
        self.fabric = fabric
        self.dtype = dtype or (slots[0].parameter.dtype if slots else torch.float32)
        self.buffers = [BucketBuffer(fabric, slots, self.dtype) for _ in range(buffers)]
        self.buffer = self.buffers[0]
        for slot in slots:
            slot.bucket = self
        self.turn_to(self.buffer)
        self.references = count_references([slot.view for slot in slots])  # to a gradient that nobody else holds
        warn_of_blindness()

    def turn_to(self, buffer: BucketBuffer) -> None:
        """Let gradients go to, and be found in, this memory from now on."""
        self.buffer = buffer
        for slot, view in zip(self.slots, buffer.views, strict=True):
            slot.view = view

    def turn_for(self, number: int) -> None:
        """Passes use the buffers in turn."""
        buffer = self.buffers[number % len(self.buffers)]
        if buffer is not self.buffer:
            self.turn_to(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return self.buffer.values.nbytes

    def begin(self) -> None:
        """Get ready for the gradients of a pass."""
        if self.buffer.renew_views():
            self.turn_to(self.buffer)
        if self.is_held():
            self.leave_memory()
        self.missing = len(self.slots)
        self.finite = True
        self.buffer.finite = None
        self.present = [1] * len(self.slots)
        for slot in self.slots:
            slot.is_divided = False

    def is_held(self) -> bool:
        """Whether somebody holds gradients that no parameter has any more, and which are not to change."""
        given_up = [slot.view for slot in self.slots if slot.parameter.grad is not slot.view]
        is_shared = count_tensors(self.buffer.values) > self.buffer.tensors
        return bool(given_up) and (is_shared or count_references(given_up) > self.references)

    def leave_memory(self) -> None:
        """Leave this memory to whoever holds it, and use other memory from now on."""
        position = self.buffers.index(self.buffer)
        self.buffers[position] = BucketBuffer(self.fabric, self.slots, self.dtype)
        self.turn_to(self.buffers[position])

    def learn(self) -> None:
        """Note how many gradients of each parameter come in a pass, of those that came for the first time."""
        for slot in self.slots:
            slot.learn()

    def refuse_converted(self, slots: Sequence[Slot]) -> None:
        """Refuse parameters that have another type than when their bucket was made."""
        dtype = self.buffer.values.dtype
        for slot in slots:
            if slot.parameter.dtype != dtype:
                raise ConfigError(
                    f"{slot.name} was {name_of(dtype)} and is {name_of(slot.parameter.dtype)} now; convert the model "
                    f"before Sync, or close() it and make another"
                )

    def copy_in(self, slots: Sequence[Slot]) -> None:
        """Copy gradients that are outside, or divide those that have come to be here."""
        self.refuse_converted(slots)
        gradients = [slot.parameter.grad for slot in slots if slot.parameter.grad is not None]
        finite = put(gradients, [slot.view for slot in slots], self.divisor)
        for slot in slots:
            slot.parameter.grad = slot.view
        if self.divisor != 1:
            self.finite = None if finite is None or self.finite is None else self.finite and finite
            for slot in slots:
                slot.is_divided = True

    def place_small(self) -> None:
        """Place all small gradients in one call: one by one, the calls would cost more than the copies."""
        if outside := [slot for slot in self.small if slot.is_outside()]:
            self.copy_in(outside)

    def fill(self) -> None:
        """Take in what has not been placed by its hook; a gradient that is not there counts as zero."""
        for position, slot in enumerate(self.slots):
            slot.place()
            if slot.parameter.grad is None:
                self.present[position] = 0
                slot.view.zero_()

    def clear(self) -> None:
        """Take part in a pass without any gradient."""
        self.buffer.values.zero_()
        self.present = [0] * len(self.slots)

    def assign_grads(self, unused: Container[str]) -> None:
        """Give a gradient that this rank did not have, but another one did, to its parameter."""
        for slot in self.slots:
            if slot.parameter.grad is None and slot.name not in unused:
                slot.parameter.grad = slot.view


def view_of(slot: Slot, flat: Tensor) -> Tensor:
    """Flat memory in the shape of a slot's parameter, with the strides that it has, as optimizers like it."""
    return flat.as_strided(slot.parameter.shape, slot.strides)
