"""Runs any program on any fabric that can post sends and receives.

Two steps are in flight. A step is completed in the order of posting: its messages are awaited, what was received is
added in ascending order of rank, and a chunk that has thereby become complete is finished (divided for a mean,
rounded for 16-bit types). Sums of 16-bit types are kept in fp32; on the wire a partial sum travels in fp32, while
raw contributions and finished results travel in their own 16 bits, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Literal, Protocol

import torch
from torch import Tensor

from syncline.collectives.program import Piece, Program, Step

Op = Literal["sum", "mean", "max"]
OPS: tuple[Op, ...] = ("sum", "mean", "max")
HALVES = (torch.float16, torch.bfloat16)
View = Callable[[int, int], Tensor]  # elements lo to hi - 1


class Pending(Protocol):
    """Messages under way."""

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when all of them have arrived and all that was sent may be changed."""


class Scratch:
    """Memory for what arrives, kept from call to call: fresh pages cost more than the addition."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor with no particular contents."""
        nbytes = numel * dtype.itemsize
        for index, block in enumerate(self.free):
            if block.numel() >= nbytes:
                return self.free.pop(index)[:nbytes].view(dtype)
        return torch.empty(nbytes, dtype=torch.uint8, device=device).view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Back for the next one."""
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.free.append(whole.set_(tensor.untyped_storage()))


class Port(Protocol):
    """The part of a fabric that the executor needs."""

    @property
    def scratch(self) -> Scratch:
        """Memory to receive into."""

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Pending:
        """Start messages that are in flight together."""


@dataclass(frozen=True)
class Reduction:
    """What to do with what arrives."""

    op: Op
    rank: int
    world: int
    wire: torch.dtype  # of contributions and results; partial sums travel in the dtype of the buffer

    def fold(self, own: Tensor, arrived: Sequence[tuple[int, Tensor]]) -> None:
        """Add operands into `own` in ascending order of rank, its own value at its own place."""
        combine = torch.maximum if self.op == "max" else torch.add
        if len(arrived) == 1:
            combine(own, arrived[0][1].to(own.dtype), out=own)
            return
        operands = sorted([*arrived, (self.rank, own)], key=lambda operand: operand[0])
        total = operands[0][1].to(own.dtype, copy=True)
        for _, operand in operands[1:]:
            combine(total, operand.to(own.dtype), out=total)
        own.copy_(total)

    def finish(self, complete: Tensor) -> None:
        """Turn a complete sum into the result, with the rounding that it will have everywhere."""
        if self.op == "mean":
            complete.copy_(divided(complete, self.world))
        if self.wire != complete.dtype:
            complete.copy_(complete.to(self.wire))


def divided(total: Tensor, world: int) -> Tensor:
    """A sum divided by the number of ranks; integers towards zero."""
    if total.is_floating_point():
        return total / world
    return torch.div(total, world, rounding_mode="trunc")


@dataclass
class Flight:
    """A step whose messages are under way, and the memory they use."""

    step: Step
    pending: Pending
    arrivals: list[tuple[Piece, Tensor]]
    keep: list[Tensor]


def execute(
    program: Program,
    port: Port,
    source: View,
    target: View,
    reduction: Reduction,
    until: float,
    on_round: Callable[[int], None],
) -> None:
    """Run one rank's program: pieces are sent from `source` and arrive in `target`, all before time `until`."""
    flights: list[Flight] = []
    for step in program:
        while flights and (step.waits or len(flights) == 2):
            complete(flights.pop(0), target, reduction, port.scratch, until)
        on_round(step.round)
        flights.append(post(step, port, source, target, reduction.wire))
    for flight in flights:
        complete(flight, target, reduction, port.scratch, until)


def post(step: Step, port: Port, source: View, target: View, wire: torch.dtype) -> Flight:
    """Start the messages of a step."""
    sends = [(on_wire(source(piece.lo, piece.hi), piece, wire), piece.peer) for piece in step.sends]
    arrivals = [(piece, landing(target(piece.lo, piece.hi), piece, wire, port.scratch)) for piece in step.receives]
    receives = [(tensor, piece.peer) for piece, tensor in arrivals]
    return Flight(step, port.post(sends, receives), arrivals, [tensor for tensor, _ in sends])


def on_wire(view: Tensor, piece: Piece, wire: torch.dtype) -> Tensor:
    """What is sent: in 16 bits where that loses nothing."""
    return view.to(wire) if piece.whole else view


def landing(view: Tensor, piece: Piece, wire: torch.dtype, scratch: Scratch) -> Tensor:
    """Where a piece arrives: in place if it is copied as it is, beside it otherwise."""
    dtype = wire if piece.whole else view.dtype
    if piece.op == "copy" and dtype == view.dtype:
        return view
    return scratch.take(view.numel(), dtype, view.device)


def complete(flight: Flight, target: View, reduction: Reduction, scratch: Scratch, until: float) -> None:
    """Wait for a step and take in what arrived."""
    flight.pending.wait(max(until - monotonic(), 0.001))
    groups: dict[tuple[int, int], list[tuple[Piece, Tensor]]] = {}
    for piece, tensor in flight.arrivals:
        if piece.op == "add":
            groups.setdefault((piece.lo, piece.hi), []).append((piece, tensor))
        elif tensor.data_ptr() != target(piece.lo, piece.hi).data_ptr():
            target(piece.lo, piece.hi).copy_(tensor)
            scratch.give(tensor)
    for (lo, hi), group in groups.items():
        own = target(lo, hi)
        reduction.fold(own, [(piece.peer, tensor) for piece, tensor in group])
        if group[0][0].completes:
            reduction.finish(own)
        for _, tensor in group:
            scratch.give(tensor)


@contextmanager
def accumulator(tensor: Tensor) -> Iterator[Tensor]:
    """The flat memory to reduce `tensor` in: itself where possible, else a copy that is written back."""
    wide = torch.float32 if tensor.dtype in HALVES else tensor.dtype
    if wide == tensor.dtype and tensor.is_contiguous():
        yield tensor.detach().view(-1)
        return
    flat = tensor.detach().to(wide, copy=True, memory_format=torch.contiguous_format).view(-1)
    yield flat
    with torch.no_grad():
        tensor.copy_(flat.view(tensor.shape))
