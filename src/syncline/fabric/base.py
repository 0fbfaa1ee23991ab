"""What every fabric offers, and the collectives that need no more of it than sending and receiving.

A fabric implements `post` (messages in flight together) and `close`; everything else follows. Every collective
starts with an agreement: ranks compare what they are about to do, and if they differ all of them raise `Desync`
before a byte of data has moved. The fabric stays usable after that. After a lost or stalled peer it does not: the
same error is raised again by every later call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import monotonic
from types import TracebackType
from typing import ClassVar, Self

import torch
from torch import Tensor

from syncline.collectives.all_gather import all_gather
from syncline.collectives.all_to_all import all_to_all
from syncline.collectives.broadcast import broadcast
from syncline.collectives.execute import OPS, Op, Pending, Reduction, Scratch, View, accumulator, execute
from syncline.collectives.flat import Algorithm
from syncline.collectives.program import compile_program
from syncline.collectives.reduce_scatter import reduce_scatter
from syncline.collectives.registry import algorithm, cheapest, schedule_of
from syncline.collectives.schedule import Hosts, Schedule, boundaries
from syncline.errors import ConfigError, FabricError, UnknownName
from syncline.fabric.agreement import compare_calls
from syncline.fabric.deadlines import Deadlines
from syncline.specs import text_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)


class Fabric(ABC):
    """How bytes move between ranks."""

    name: ClassVar[str]
    latency_s: ClassVar[float] = 150e-6  # of one message: what `auto` assumes
    bytes_per_s: ClassVar[float] = 1e9  # of one link: what `auto` assumes
    segment_bytes: ClassVar[int] = 2 << 20  # larger has fewer messages, smaller overlaps better
    grain_bytes: ClassVar[int] = 4096  # chunks are cut at multiples of it; small buffers have fewer chunks

    def __init__(self, rank: int, world: int, hosts: Hosts, deadlines: Deadlines) -> None:
        self.rank = rank
        self.world = world
        self.hosts = hosts
        self.deadlines = deadlines
        self.device = torch.device("cpu")
        self.during = "nothing"
        self.scratch = Scratch()
        self.calls = 0
        self.broken: FabricError | None = None

    @abstractmethod
    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Pending:
        """Start messages that are in flight together. Between two ranks they match in the order of posting."""

    @abstractmethod
    def close(self) -> None:
        """Give back what this rank holds. Safe to call twice."""

    def enter_round(self, number: int) -> None:  # noqa: B027 - most fabrics need not know
        """Told before the messages of a round are posted."""

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A zeroed flat tensor, in memory that peers can reach where there is such a thing."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start sending; the tensor may be changed again after `wait`."""
        return self.post([(flat_view(tensor), to)], [])

    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Start receiving a tensor of the same size and dtype; it may be read after `wait`."""
        return self.post([], [(flat_view(tensor), source)])

    def all_reduce(self, tensor: Tensor, op: Op = "sum", collective: str | Algorithm = "auto") -> Tensor:
        """Replace `tensor` on every rank by the sum, mean or maximum over ranks; the same bits everywhere.

        `collective` is an algorithm (`"ring"`, `"tree:arity=4"`, `Ring()`), `"engine"` for the engine's own where
        there is an engine, or `"auto"`. Integers are divided towards zero by `op="mean"`.
        """
        self._check(tensor, op)
        text = self._collective(collective, tensor.numel() * tensor.element_size())
        self._agree("all_reduce", op, tensor, text)
        if text == "engine":
            self._engine_all_reduce(tensor, op)
            return tensor
        with accumulator(tensor) as flat:
            self._run(schedule_of(text, self.world, self.hosts), flat, op, tensor.dtype)
        return tensor

    def reduce_scatter(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """This rank's slice of the flat sum, mean or maximum: ceil(n / W) elements, fewer at the end."""
        self._check(tensor, op)
        self._agree("reduce_scatter", op, tensor)
        with accumulator(tensor.clone()) as flat:
            self._run(reduce_scatter(self.world), flat, op, tensor.dtype, grain=1)
            bounds = boundaries(flat.numel(), self.world)
            return flat[bounds[self.rank] : bounds[self.rank + 1]].to(tensor.dtype, copy=True)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Everyone's tensor, stacked in order of rank."""
        self._check(tensor)
        self._agree("all_gather", "copy", tensor)
        gathered = tensor.new_empty(self.world, *tensor.shape)
        gathered[self.rank] = tensor.detach()
        self._run(all_gather(self.world), gathered.view(-1), "sum", tensor.dtype, grain=1)
        return gathered

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Replace `tensor` on every rank by that of `root`."""
        self._check(tensor)
        if root not in range(self.world):
            raise ConfigError(f"root={root} is not a rank of this world; ranks are 0..{self.world - 1}")
        self._agree("broadcast", f"from {root}", tensor)
        flat = tensor.detach().contiguous().view(-1)
        self._run(broadcast(self.world, root), flat, "sum", tensor.dtype)
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))
        return tensor

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Part i of the result is what rank i had as part `rank`; a tensor is cut into W equal parts."""
        self._check(tensor)
        if tensor.numel() % self.world:
            raise ConfigError(
                f"{tensor.numel()} elements do not divide into {self.world} equal parts; "
                f"pad to {-(-tensor.numel() // self.world) * self.world}"
            )
        self._agree("all_to_all", "copy", tensor)
        part = tensor.numel() // self.world
        given = tensor.detach().contiguous().view(-1)
        taken = torch.empty_like(given)
        own = slice(self.rank * part, (self.rank + 1) * part)
        taken[own] = given[own]

        def source(lo: int, hi: int) -> Tensor:
            return given[lo - self.rank * self.world * part : hi - self.rank * self.world * part]

        def target(lo: int, hi: int) -> Tensor:
            sender, within = lo // (self.world * part), lo % part
            return taken[sender * part + within : sender * part + within + hi - lo]

        reduction = Reduction("sum", self.rank, self.world, tensor.dtype)
        self._execute(all_to_all(self.world), self.world * given.numel(), source, target, reduction, grain=1)
        return taken.view(tensor.shape)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._agree("barrier")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What a fabric may do better or differently.

    def _engine_all_reduce(self, tensor: Tensor, op: Op) -> None:
        """Hand the tensor to the engine under this fabric."""
        raise ConfigError(f'collective="engine" needs an engine; the {self.name} fabric has none: use "auto"')

    # How the collectives above are run.

    def _collective(self, collective: str | Algorithm, nbytes: int) -> str:
        """The text that names the algorithm, the same on all ranks that asked for the same."""
        if not isinstance(collective, str):
            return text_of(collective.name, collective)
        if collective == "auto":
            return cheapest(nbytes, self.world, self.hosts, self.latency_s, self.bytes_per_s)
        if collective != "engine":
            algorithm(collective)
        return collective

    def _check(self, tensor: Tensor, op: str = "sum") -> None:
        """Refuse what cannot be sent."""
        if op not in OPS:
            raise UnknownName("op", op, OPS)
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ConfigError(f"{tensor.dtype} cannot be sent; use one of {known}")
        if tensor.is_sparse or tensor.device.type != self.device.type:
            raise ConfigError(
                f"a {tensor.layout} tensor on {tensor.device} cannot be sent; the {self.name} fabric "
                f"takes dense tensors on {self.device.type}"
            )

    def _agree(self, call: str, how: str = "", tensor: Tensor | None = None, collective: str = "") -> None:
        """Compare with all ranks what is about to be done."""
        if self.broken is not None:
            raise self.broken
        self.calls += 1
        self.during = describe(call, how, tensor, collective)
        if self.world > 1:
            compare_calls(self, f"{self.during}, call {self.calls}", monotonic() + self.deadlines.operation)

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


def describe(call: str, how: str, tensor: Tensor | None, collective: str) -> str:
    """A call as text: `all_reduce(sum, float32[1000003], ring)`."""
    what = "" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"
    return f"{call}({', '.join(filter(None, (how, what, collective)))})"


def flat_view(tensor: Tensor) -> Tensor:
    """The tensor's own memory as one line."""
    if not tensor.is_contiguous():
        raise ConfigError(f"a message needs contiguous memory, not strides {tensor.stride()}; use contiguous()")
    return tensor.detach().view(-1)
