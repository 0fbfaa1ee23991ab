"""The executor: collectives along their schedules, as messages of a transport, in the thread that asks for them."""

from __future__ import annotations

from time import monotonic

import torch
from torch import Tensor

from syncline.collectives.all_gather import all_gather
from syncline.collectives.all_to_all import all_to_all
from syncline.collectives.broadcast import broadcast
from syncline.collectives.execute import Op, Reduction, View, accumulator, execute
from syncline.collectives.program import compile_program
from syncline.collectives.reduce_scatter import reduce_scatter
from syncline.collectives.registry import schedule_of
from syncline.collectives.schedule import Schedule, boundaries
from syncline.fabric.transport import MessageTransport


class Executor:
    """Runs the schedules of one rank."""

    def __init__(self, transport: MessageTransport) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.world = transport.world

    def all_reduce(self, tensor: Tensor, op: Op, collective: str) -> None:
        """Reduce in place, along the schedule of an algorithm."""
        with accumulator(tensor) as flat:
            self._run(schedule_of(collective, self.world, self.transport.group.hosts), flat, op, tensor.dtype)

    def reduce_scatter(self, tensor: Tensor, op: Op) -> Tensor:
        """This rank's slice of the reduction."""
        with accumulator(tensor.clone()) as flat:
            self._run(reduce_scatter(self.world), flat, op, tensor.dtype, grain=1)
            bounds = boundaries(flat.numel(), self.world)
            return flat[bounds[self.rank] : bounds[self.rank + 1]].to(tensor.dtype, copy=True)

    def all_gather(self, gathered: Tensor) -> None:
        """Fill a flat tensor, in which this rank's own part is."""
        self._run(all_gather(self.world), gathered, "sum", gathered.dtype, grain=1)

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Replace a flat tensor by that of `root`."""
        self._run(broadcast(self.world, root), flat, "sum", flat.dtype)

    def all_to_all(self, taken: Tensor, flat: Tensor) -> None:
        """Fill a flat tensor with everyone's part for this rank."""
        part = flat.numel() // self.world
        own = slice(self.rank * part, (self.rank + 1) * part)
        taken[own] = flat[own]

        def source(lo: int, hi: int) -> Tensor:
            start = self.rank * self.world * part
            return flat[lo - start : hi - start]

        def target(lo: int, hi: int) -> Tensor:
            sender, within = lo // (self.world * part), lo % part
            return taken[sender * part + within : sender * part + within + hi - lo]

        reduction = Reduction("sum", self.rank, self.world, flat.dtype)
        self._execute(all_to_all(self.world), self.world * flat.numel(), source, target, reduction, grain=1)

    def _run(self, schedule: Schedule, flat: Tensor, op: Op, wire: torch.dtype, grain: int = 0) -> None:
        """Run a schedule in place on one flat buffer."""

        def view(lo: int, hi: int) -> Tensor:
            return flat[lo:hi]

        self._execute(schedule, flat.numel(), view, view, Reduction(op, self.rank, self.world, wire), grain)

    def _execute(
        self, schedule: Schedule, numel: int, source: View, target: View, reduction: Reduction, grain: int = 0
    ) -> None:
        """Run this rank's program of a schedule."""
        transport, itemsize = self.transport, reduction.wire.itemsize
        segment = max(transport.segment_bytes // itemsize, 1)
        program = compile_program(schedule, self.rank, numel, segment, grain or transport.grain_bytes // itemsize)
        until = monotonic() + transport.deadlines.operation
        execute(program, transport, source, target, reduction, until, transport.enter_round)
