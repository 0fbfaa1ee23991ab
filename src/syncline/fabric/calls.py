"""The collectives that users call on a fabric. Ranks compare a call before data moves, and it is over when it returns.

If ranks differ in what they are about to do, all of them raise `Desync` and the fabric is usable after it. After a lost
or stalled peer it is not: every later call raises the same error again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import TypeVar

import torch
from torch import Tensor

from syncline.collectives.execute import OPS, Op
from syncline.collectives.flat import Algorithm
from syncline.collectives.registry import algorithm, schedule_of
from syncline.errors import ConfigError, UnknownName
from syncline.fabric.comparing import compare_calls
from syncline.fabric.executor import Executor
from syncline.fabric.handle import Ended, Handle, Times
from syncline.fabric.transport import MessageTransport, Transport
from syncline.specs import text_of

T = TypeVar("T")
MOST_NAME_BYTES = 100  # of an algorithm with its settings; ranks compare it in full
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)


class Calls(ABC):
    """What a transport does its own way, of calls that were checked on this rank and are compared with the others."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op, collective: str) -> None:
        """Reduce in place; `collective` names an algorithm, the transport's own, or the engine."""

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor, op: Op, collective: str) -> Handle:
        """The same, of which others may be started before it is over."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, op: Op) -> Tensor:
        """This rank's slice of the reduction."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Everyone's tensor, stacked in order of rank."""

    @abstractmethod
    def broadcast(self, flat: Tensor, root: int) -> None:
        """Replace a flat tensor by that of `root`."""

    @abstractmethod
    def all_to_all(self, flat: Tensor) -> Tensor:
        """Everyone's part for this rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""


class MessageCalls(Calls):
    """Calls along schedules: in the caller's thread, unless calls that were started before are still queued."""

    def __init__(self, transport: MessageTransport) -> None:
        self.transport = transport
        self.executor = Executor(transport)
        self.met_ns = 0
        self.in_flight: list[tuple[Handle, Tensor]] = []

    def all_reduce(self, tensor: Tensor, op: Op, collective: str) -> None:
        self.transport.thread.in_turn(lambda: self._begin_reduce(tensor, op, collective)())

    def start_all_reduce(self, tensor: Tensor, op: Op, collective: str) -> Handle:
        def begin() -> Callable[[], Ended]:
            began_ns = monotonic_ns()
            end = self._begin_reduce(tensor, op, collective)
            met_ns = self.met_ns

            def ended() -> Ended:
                finite = end()
                return Ended(Times(began_ns, met_ns, monotonic_ns()), finite)

            return ended

        call, thread = describe("all_reduce", op, tensor, collective), self.transport.thread
        if collective == "engine" and not self._is_in_flight(tensor):
            handle = thread.submit_flight(begin, call, self.transport.deadlines.operation)
            self.in_flight = [*(one for one in self.in_flight if not one[0].done()), (handle, tensor)]
            return handle
        return thread.submit(lambda: begin()().times, call, self.transport.deadlines.operation)

    def reduce_scatter(self, tensor: Tensor, op: Op) -> Tensor:
        return self._run(describe("reduce_scatter", op, tensor), lambda: self.executor.reduce_scatter(tensor, op))

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty(self.transport.world, *tensor.shape)
        gathered[self.transport.rank] = tensor.detach()
        self._run(describe("all_gather", "copy", tensor), lambda: self.executor.all_gather(gathered.view(-1)))
        return gathered

    def broadcast(self, flat: Tensor, root: int) -> None:
        self._run(describe("broadcast", f"from {root}", flat), lambda: self.executor.broadcast(flat, root))

    def all_to_all(self, flat: Tensor) -> Tensor:
        taken = torch.empty_like(flat)
        self._run(describe("all_to_all", "copy", flat), lambda: self.executor.all_to_all(taken, flat))
        return taken

    def barrier(self) -> None:
        self._run(describe("barrier"), lambda: None)

    def begin_engine(self, tensor: Tensor, op: Op) -> Callable[[], bool | None]:
        """Let the engine begin; what is returned waits for it, and says whether the result is finite if it knows."""
        raise ConfigError(f'collective="engine" needs an engine; the {self.transport.name} fabric has none: use "auto"')

    def _is_in_flight(self, tensor: Tensor) -> bool:
        """Whether a call on the same memory has not ended: the next one on it must not begin before."""
        memory = tensor.untyped_storage().data_ptr()
        return any(not handle.done() and one.untyped_storage().data_ptr() == memory for handle, one in self.in_flight)

    def _begin_reduce(self, tensor: Tensor, op: Op, collective: str) -> Callable[[], bool | None]:
        """Compare, and let the engine begin; what is returned does the rest."""
        self._compare(describe("all_reduce", op, tensor, collective))
        if collective == "engine":
            return self.begin_engine(tensor, op)
        return partial(self.executor.all_reduce, tensor, op, collective)

    def _run(self, call: str, work: Callable[[], T]) -> T:
        """Compare a call and carry it out, after those that are queued."""

        def compared() -> T:
            self._compare(call)
            return work()

        return self.transport.thread.in_turn(compared)

    def _compare(self, call: str) -> None:
        """Compare with all ranks what is about to be done."""
        self.transport.begin_call(call)
        compare_calls(self.transport, f"{call}, call {self.transport.call_count}")
        self.met_ns = monotonic_ns()


# What is checked on this rank before anything is sent.


def check(transport: Transport, tensor: Tensor, op: str = "sum") -> None:
    """Refuse what cannot be sent."""
    transport.birthplace.require()
    if op not in OPS:
        raise UnknownName("op", op, OPS)
    if tensor.dtype not in DTYPES:
        known = ", ".join(name_of(dtype) for dtype in DTYPES)
        raise ConfigError(f"{tensor.dtype} cannot be sent; use one of {known}")
    if tensor.is_sparse or tensor.device.type != transport.device.type:
        raise ConfigError(
            f"a {tensor.layout} tensor on {tensor.device} cannot be sent; the {transport.name} fabric "
            f"takes dense tensors on {transport.device.type}"
        )


def check_rank(rank: int, world: int) -> int:
    """Refuse a rank that is not there."""
    if rank not in range(world):
        raise ConfigError(f"{rank} is not a rank of this world; ranks are 0..{world - 1}")
    return rank


def collective_text(transport: Transport, collective: str | Algorithm, tensor: Tensor) -> str:
    """The text that names an algorithm, the same on all ranks that asked for the same in whatever words."""
    if collective == "auto" or (collective == "engine" and transport.world == 1):
        return transport.auto(tensor.nbytes)
    if collective == "engine":
        return "engine"
    chosen = algorithm(collective) if isinstance(collective, str) else collective
    text = text_of(chosen.name, chosen)
    if len(text.encode()) > MOST_NAME_BYTES:
        raise ConfigError(f"{text[:40]}... has more than {MOST_NAME_BYTES} bytes, too many for ranks to compare")
    schedule_of(text, transport.world, transport.group.hosts)  # what is impossible here is refused here
    return text


def describe(call: str, how: str = "", tensor: Tensor | None = None, collective: str = "") -> str:
    """A call as text: `all_reduce(sum, float32[1000003], ring)`. It is what ranks compare and what errors print."""
    what = "" if tensor is None else f"{name_of(tensor.dtype)}[{tensor.numel()}]"
    return f"{call}({', '.join(filter(None, (how, what, collective)))})"


def name_of(dtype: torch.dtype) -> str:
    """`float32`"""
    return str(dtype).removeprefix("torch.")


def flat_view(tensor: Tensor) -> Tensor:
    """The tensor's own memory as one line."""
    if not tensor.is_contiguous():
        raise ConfigError(f"a message needs contiguous memory, not strides {tensor.stride()}; use contiguous()")
    return tensor.detach().view(-1)
