"""Runs any program on any fabric that can post sends and receives.

A step is completed in the order of the program: its messages are awaited, what was received is added in ascending
order of rank, and a chunk that has thereby become complete is finished (divided for a mean, rounded for 16-bit types).
Sums of 16-bit types are kept in fp32; on the wire a partial sum travels in fp32, while raw contributions and finished
results travel in their own 16 bits, which loses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, Protocol

import torch
from torch import Tensor

from syncline.collectives.program import Piece, Program

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

    @property
    def receives_ahead(self) -> bool:
        """Whether receives may be posted before the sends that leave at the same time."""

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

    arrivals: list[tuple[Piece, Tensor]]
    pending: list[Pending] = field(default_factory=list)
    sending: list[Tensor] = field(default_factory=list)


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
    execution = Execution(program, port, source, target, reduction, until)
    for number, step in enumerate(program):
        execution.receive_ahead(number)
        while execution.done < step.sends_after:
            execution.complete_first()
            execution.receive_ahead(number)
        on_round(step.round)
        execution.send(number)
    while execution.flights:
        execution.complete_first()


@dataclass
class Execution:
    """A program under way. The flights are the steps that are not complete, in order; the last of them only receive."""

    program: Program
    port: Port
    source: View
    target: View
    reduction: Reduction
    until: float
    flights: deque[Flight] = field(default_factory=deque)
    done: int = 0

    def receive_ahead(self, number: int) -> None:
        """Make room for what arrives, as far ahead of step `number` as may be, and ask for it."""
        ahead = self.port.receives_ahead
        for step in self.program[self.done + len(self.flights) : None if ahead else number + 1]:
            if step.receives_after > self.done:
                return
            flight = Flight([(piece, self.landing(piece)) for piece in step.receives])
            self.flights.append(flight)
            if ahead:
                self.post(flight, [], received(flight))

    def send(self, number: int) -> None:
        """Start what a step sends; and what it receives, where both must start together."""
        flight = self.flights[number - self.done]
        sends = [(self.on_wire(piece), piece.peer) for piece in self.program[number].sends]
        self.post(flight, sends, [] if self.port.receives_ahead else received(flight))
        flight.sending = [tensor for tensor, _ in sends]

    def post(self, flight: Flight, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Start messages, if there are any."""
        if sends or receives:
            flight.pending.append(self.port.post(sends, receives))

    def complete_first(self) -> None:
        """Wait for the first step under way and take in what arrived."""
        flight = self.flights.popleft()
        for pending in flight.pending:
            pending.wait(max(self.until - monotonic(), 0.001))
        self.done += 1
        groups: dict[tuple[int, int], list[tuple[Piece, Tensor]]] = {}
        for piece, tensor in flight.arrivals:
            if piece.op == "add":
                groups.setdefault((piece.lo, piece.hi), []).append((piece, tensor))
            elif tensor.data_ptr() != self.target(piece.lo, piece.hi).data_ptr():
                self.target(piece.lo, piece.hi).copy_(tensor)
                self.port.scratch.give(tensor)
        for (lo, hi), group in groups.items():
            self.add(self.target(lo, hi), group)

    def add(self, own: Tensor, group: list[tuple[Piece, Tensor]]) -> None:
        """Add what arrived for one place, and finish what is complete."""
        self.reduction.fold(own, [(piece.peer, tensor) for piece, tensor in group])
        if group[0][0].completes:
            self.reduction.finish(own)
        for _, tensor in group:
            self.port.scratch.give(tensor)

    def on_wire(self, piece: Piece) -> Tensor:
        """What is sent: in 16 bits where that loses nothing."""
        view = self.source(piece.lo, piece.hi)
        return view.to(self.reduction.wire) if piece.whole else view

    def landing(self, piece: Piece) -> Tensor:
        """Where a piece arrives: in place if it is copied as it is, beside it otherwise."""
        view = self.target(piece.lo, piece.hi)
        dtype = self.reduction.wire if piece.whole else view.dtype
        if piece.op == "copy" and dtype == view.dtype:
            return view
        return self.port.scratch.take(view.numel(), dtype, view.device)


def received(flight: Flight) -> list[tuple[Tensor, int]]:
    """What a step receives, and from whom."""
    return [(tensor, piece.peer) for piece, tensor in flight.arrivals]


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
