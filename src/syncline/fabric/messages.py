"""Fabrics that move messages: every collective is a schedule, run by the executor over `post`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic, monotonic_ns

import torch
from torch import Tensor

from syncline.collectives.all_gather import all_gather
from syncline.collectives.all_to_all import all_to_all
from syncline.collectives.broadcast import broadcast
from syncline.collectives.execute import Op, Reduction, Scratch, View, accumulator, execute
from syncline.collectives.program import compile_program
from syncline.collectives.reduce_scatter import reduce_scatter
from syncline.collectives.registry import schedule_of
from syncline.collectives.schedule import Hosts, Schedule, boundaries
from syncline.errors import ConfigError, FabricClosed, FabricError
from syncline.fabric.agreement import compare_calls
from syncline.fabric.base import Ended, Fabric, Times, describe
from syncline.fabric.channel import Channel, MessageChannel
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.worker import Worker, WorkerHandle


class MessageFabric(Fabric):
    """A fabric that needs no more than `post` and `close`."""

    def __init__(self, rank: int, world: int, hosts: Hosts, deadlines: Deadlines) -> None:
        super().__init__(rank, world, hosts, deadlines)
        self.scratch = Scratch()
        self.calls = 0
        self.during = "nothing"
        self.broken: FabricError | None = None
        self.met_ns = 0
        self.flying: list[tuple[WorkerHandle, Tensor]] = []
        self.worker = Worker(f"rank {rank} communicates")

    def enter_round(self, number: int) -> None:
        """Told before the messages of a round are posted."""

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.worker.in_turn(lambda: self._agree(describe("barrier")))

    def _close(self, drain: bool) -> None:
        self.worker.close(drain)
        self.broken = FabricClosed("the fabric is closed; make a new one")

    def _engine_all_reduce(self, tensor: Tensor, op: Op) -> Callable[[], bool | None]:
        """Hand the tensor to the engine under this fabric.

        What is returned waits until it is done, and says whether the result is finite where it knows.
        """
        raise ConfigError(f'collective="engine" needs an engine; the {self.name} fabric has none: use "auto"')

    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> None:
        self.worker.in_turn(lambda: self._begin_reduce(tensor, op, collective)())

    def _all_reduce_async(self, tensor: Tensor, op: Op, collective: str) -> WorkerHandle:
        def begin() -> Callable[[], Ended]:
            began_ns = monotonic_ns()
            end = self._begin_reduce(tensor, op, collective)
            met_ns = self.met_ns

            def ended() -> Ended:
                finite = end()
                return Ended(Times(began_ns, met_ns, monotonic_ns()), finite)

            return ended

        call = describe("all_reduce", op, tensor, collective)
        if collective == "engine" and not self._is_flying(tensor):
            handle = self.worker.submit_flight(begin, call, self.deadlines.operation)
            self.flying = [*(flight for flight in self.flying if not flight[0].done()), (handle, tensor)]
            return handle
        return self.worker.submit(lambda: begin()().times, call, self.deadlines.operation)

    def _is_flying(self, tensor: Tensor) -> bool:
        """Whether a call on the same memory has not ended: the next one on it must not begin before."""
        memory = tensor.untyped_storage().data_ptr()
        return any(not handle.done() and other.untyped_storage().data_ptr() == memory for handle, other in self.flying)

    def _begin_reduce(self, tensor: Tensor, op: Op, collective: str) -> Callable[[], bool | None]:
        """Agree, and let the engine begin; what is returned does the rest."""
        self._agree(describe("all_reduce", op, tensor, collective))
        if collective == "engine":
            return self._engine_all_reduce(tensor, op)
        return partial(self.reduce_along, tensor, op, collective)

    def reduce_along(self, tensor: Tensor, op: Op, collective: str) -> None:
        """Along the schedule of an algorithm."""
        with accumulator(tensor) as flat:
            self._run(schedule_of(collective, self.world, self.hosts), flat, op, tensor.dtype)

    def _reduce_scatter(self, tensor: Tensor, op: Op) -> Tensor:
        def work() -> Tensor:
            self._agree(describe("reduce_scatter", op, tensor))
            with accumulator(tensor.clone()) as flat:
                self._run(reduce_scatter(self.world), flat, op, tensor.dtype, grain=1)
                bounds = boundaries(flat.numel(), self.world)
                return flat[bounds[self.rank] : bounds[self.rank + 1]].to(tensor.dtype, copy=True)

        return self.worker.in_turn(work)

    def _all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty(self.world, *tensor.shape)
        gathered[self.rank] = tensor.detach()

        def work() -> Tensor:
            self._agree(describe("all_gather", "copy", tensor))
            self.gather_along(gathered.view(-1))
            return gathered

        return self.worker.in_turn(work)

    def gather_along(self, gathered: Tensor) -> None:
        """Fill a flat tensor, in which this rank's own part is, along the schedule of an all-gather."""
        self._run(all_gather(self.world), gathered, "sum", gathered.dtype, grain=1)

    def _broadcast(self, flat: Tensor, root: int) -> None:
        def work() -> None:
            self._agree(describe("broadcast", f"from {root}", flat))
            self._run(broadcast(self.world, root), flat, "sum", flat.dtype)

        self.worker.in_turn(work)

    def _all_to_all(self, flat: Tensor) -> Tensor:
        taken = torch.empty_like(flat)

        def work() -> Tensor:
            self._agree(describe("all_to_all", "copy", flat))
            self.exchange_along(taken, flat)
            return taken

        return self.worker.in_turn(work)

    def exchange_along(self, taken: Tensor, flat: Tensor) -> None:
        """Fill a flat tensor with everyone's part for this rank, along the schedule of an all-to-all."""
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

    def _channel(self) -> Channel:
        return MessageChannel(self)

    def begin_call(self, call: str) -> None:
        """Count a call, unless none can be made any more."""
        if self.broken is not None:
            raise self.broken
        self.calls += 1
        self.during = call

    def _agree(self, call: str) -> None:
        """Compare with all ranks what is about to be done."""
        self.begin_call(call)
        if self.world > 1:
            compare_calls(self, f"{call}, call {self.calls}", monotonic() + self.deadlines.operation)
        self.met_ns = monotonic_ns()

    def _run(self, schedule: Schedule, flat: Tensor, op: Op, wire: torch.dtype, grain: int = 0) -> None:
        """Run a schedule in place on one flat buffer."""

        def view(lo: int, hi: int) -> Tensor:
            return flat[lo:hi]

        self._execute(schedule, flat.numel(), view, view, Reduction(op, self.rank, self.world, wire), grain)

    def _execute(
        self, schedule: Schedule, numel: int, source: View, target: View, reduction: Reduction, grain: int = 0
    ) -> None:
        """Run this rank's program of a schedule."""
        itemsize = reduction.wire.itemsize
        segment = max(self.segment_bytes // itemsize, 1)
        grain = grain or self.grain_bytes // itemsize
        program = compile_program(schedule, self.rank, numel, segment, grain)
        until = monotonic() + self.deadlines.operation
        execute(program, self, source, target, reduction, until, self.enter_round)
