"""A bucket: gradients that travel together, as views of one flat buffer in memory that the fabric can reach.

    values                                        tail
    gradient 0 | gradient 1 | ... | gradient k    flags, one for each gradient | bad | verdict, in one bucket
                                          failed | late | thawed | touched | 24 bits of a fingerprint | rank 0 | ...

The flags are 1 where this rank has that gradient and 0 where it has none; they are averaged along with the values, so a
mean of 0 says that no rank had it, which costs no message. Bad is set by a rank whose gradients a codec cannot encode.
The verdict is what all ranks must know at the end of a pass: whether one of them failed, whether one came to it only in
its step, whether one has unfrozen parameters, or touched its replica outside the optimizer's step, which took part with
data, and how many passes each has made since its last step. The mean of a bit of the fingerprint is 0 or 1 if all ranks
have the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from syncline.buckets.placing import SMALL_BYTES, put
from syncline.errors import ConfigError
from syncline.fabric.base import Fabric, name_of
from syncline.guards.claims import strides_of
from syncline.guards.fingerprint import DIGEST_BITS

FLAGS = 4  # of a verdict: words that are set if some rank sets them
COMMON_WORDS = FLAGS + DIGEST_BITS  # of a verdict: those that are not of one rank
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
            self.bucket.take_in([self])

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


class Side:
    """The memory of a bucket for one pass. There are two where the next pass begins before this one has arrived."""

    def __init__(self, fabric: Fabric, slots: Sequence[Slot], dtype: torch.dtype, has_verdict: bool) -> None:
        numel = sum(slot.parameter.numel() for slot in slots)
        self.flat = fabric.buffer(numel + len(slots) + 1 + (COMMON_WORDS + fabric.world) * has_verdict, dtype)
        self.values = self.flat[:numel]
        self.tail = self.flat[numel:]
        self.flags = self.tail[: len(slots)]
        self.bad = self.tail[len(slots) : len(slots) + 1]
        self.verdict = self.tail[len(slots) + 1 :]
        self.finite: bool | None = None  # whether the means are, where the fabric has seen it
        self.views: list[Tensor] = []
        start = 0
        for slot in slots:
            self.views.append(view_of(slot, self.values[start : start + slot.parameter.numel()]))
            start += slot.parameter.numel()
        self.places = [(view.data_ptr(), view.storage_offset(), view.shape, view.stride()) for view in self.views]

    def renew_views(self) -> bool:
        """Make those anew that are elsewhere by now: `parameter.grad.data = ...` moves the very tensor. Any?"""
        moved = [number for number, view in enumerate(self.views) if view.data_ptr() != self.places[number][0]]
        for number in moved:
            _, offset, shape, strides = self.places[number]
            self.views[number] = self.flat.as_strided(shape, strides, offset)
        return bool(moved)


class Bucket:
    """Gradients that travel together."""

    def __init__(
        self,
        fabric: Fabric,
        number: int,
        slots: Sequence[Slot],
        has_verdict: bool,
        sides: int = 1,
        dtype: torch.dtype | None = None,
        divisor: int = 1,
    ) -> None:
        self.number = number  # the order in which buckets leave
        self.slots = slots
        self.small = [slot for slot in slots if slot.is_small]
        self.missing = 0  # gradients that are still to come
        self.divisor = divisor  # of gradients on their way in, where the fabric only adds
        self.finite: bool | None = True  # whether all that was divided is; None where nobody has looked
        dtype = dtype or (slots[0].parameter.dtype if slots else torch.float32)
        self.sides = [Side(fabric, slots, dtype, has_verdict) for _ in range(sides)]
        self.side = self.sides[0]
        for slot in slots:
            slot.bucket = self
        self.turn_to(self.side)

    def turn_to(self, side: Side) -> None:
        """Let gradients go to, and be found on, this side from now on."""
        self.side = side
        for slot, view in zip(self.slots, side.views, strict=True):
            slot.view = view

    def turn_for(self, number: int) -> None:
        """Passes use the sides in turn."""
        side = self.sides[number % len(self.sides)]
        if side is not self.side:
            self.turn_to(side)

    @property
    def nbytes(self) -> int:
        """Of the gradients."""
        return self.side.values.nbytes

    def begin(self) -> None:
        """Get ready for the gradients of a pass."""
        if self.side.renew_views():
            self.turn_to(self.side)
        self.missing = len(self.slots)
        self.finite = True
        for slot in self.slots:
            slot.is_divided = False

    def learn(self) -> None:
        """How many gradients of each come in a pass, of those that came for the first time."""
        for slot in self.slots:
            slot.learn()

    def take_in(self, slots: Sequence[Slot]) -> None:
        """Copy gradients that are outside, or divide those that have come to be here."""
        for slot in slots:
            if slot.parameter.dtype != slot.view.dtype:
                raise ConfigError(
                    f"{slot.name} was {name_of(slot.view.dtype)} and is {name_of(slot.parameter.dtype)} now; convert "
                    f"the model before Sync, or close() it and make another"
                )
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
            self.take_in(outside)

    def fill(self) -> None:
        """Take in what has not been placed by its hook; a gradient that is not there counts as zero."""
        present = []
        for slot in self.slots:
            slot.place()
            present.append(slot.parameter.grad is not None)
            if not present[-1]:
                slot.view.zero_()
        self.side.flags.copy_(torch.tensor(present))

    def hand_out(self) -> None:
        """Give a gradient that this rank did not have, but another one did, to its parameter."""
        absent = [position for position, slot in enumerate(self.slots) if slot.parameter.grad is None]
        if absent:
            somewhere = self.side.flags.tolist()
            for position in absent:
                if somewhere[position] > 0:
                    self.slots[position].parameter.grad = self.slots[position].view

    def hand_out_all(self) -> None:
        """Give every parameter the gradient of this side, which is not the one it had; None where no rank had any."""
        for slot, flag in zip(self.slots, self.side.flags.tolist(), strict=True):
            slot.parameter.grad = slot.view if flag > 0 else None


def view_of(slot: Slot, flat: Tensor) -> Tensor:
    """Flat memory in the shape of a slot's parameter, with the strides that it has, as optimizers like it."""
    return flat.as_strided(slot.parameter.shape, slot.strides)
