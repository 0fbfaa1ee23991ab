"""Shared memory: ranks of one machine read each other's buffers in place. The native core does the work.

A tensor from `buffer()` lies in memory that all ranks have mapped, so an all-reduce copies nothing before it adds; any
other tensor is staged through such memory in pieces. Every algorithm runs natively from its schedule; `auto` is the
fabric's own: each rank owns a slice, adds it over all buffers in rank order 0..W-1 and writes the result to all.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from syncline.collectives.execute import Op
from syncline.collectives.registry import schedule_of
from syncline.collectives.rows import Rows, compile_rows
from syncline.collectives.schedule import boundaries
from syncline.core.group import Group
from syncline.errors import ConfigError, FabricError
from syncline.fabric.base import Fabric
from syncline.fabric.call_thread import CallThread
from syncline.fabric.calls import Calls, check_rank
from syncline.fabric.channel import Channel
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.forked import Birthplace
from syncline.fabric.handle import Times, not_done_message
from syncline.fabric.health import Health, RankProgress
from syncline.fabric.transport import Messages, Transport

if TYPE_CHECKING:
    from syncline import _native

MOST_RANKS = 64
SIGNALS_S = 0.1
DTYPE_CODES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
OP_CODES: dict[str, int] = {"sum": 0, "max": 1, "mean": 2}
Wait = Callable[[int, int, float], None]  # for a peer's message of that number, so many seconds


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one machine meet: a local socket, and a number that only they know."""

    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def address(self) -> str:
        """A name in the abstract namespace: there is no file to leave behind."""
        return f"@syncline-{self.nonce.hex()}"

    def aside(self, about: str) -> Meeting:
        """Where some of the ranks meet: a place that all of them know without a word."""
        return Meeting(hashlib.blake2b(about.encode(), key=self.nonce, digest_size=len(self.nonce)).digest())


def missing() -> str:
    """Why there can be no shared-memory fabric here; empty if there can."""
    try:
        from syncline import _native  # noqa: F401
    except ImportError:
        return "the native module was not built; see syncline doctor"
    return ""


class ShmTransport(Transport):
    """One rank of a group that shares memory."""

    name = "shm"
    segment_bytes: int = 256 << 10

    def __init__(self, meeting: Meeting, rank: int, group: Group, deadlines: Deadlines) -> None:
        if reason := missing():
            raise ConfigError(f"there is no shared-memory fabric: {reason}")
        if group.world > MOST_RANKS:
            raise ConfigError(f'{group.world} ranks are more than {MOST_RANKS}; use fabric="torch"')
        from syncline import _native

        super().__init__(rank, group, deadlines)
        self.meeting = meeting
        self.waiter = CallThread(
            f"rank {rank} waits"
        )  # for calls of the native thread that somebody wants to be told of
        self.native: _native.Group = _native.Group(
            meeting.address, rank, group.world, meeting.nonce, deadlines.operation, deadlines.join
        )
        self.health = ShmHealth(self.native, group.world, self.birthplace)

    def calls(self) -> ShmCalls:
        return ShmCalls(self)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat tensor that peers reach in place. The memory lives as long as the tensor."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        return torch.from_numpy(self.native.buffer(numel * dtype.itemsize)).view(dtype)

    def auto(self, nbytes: int) -> str:
        return "auto"

    def post(self, sends: Messages, receives: Messages) -> ShmPending:
        self.birthplace.require()
        waits: list[tuple[Wait, int, int, Tensor]] = []
        for tensor, source in receives:
            number = self.native.receive(tensor.data_ptr(), tensor.nbytes, source)
            waits.append((self.native.wait_received, source, number, tensor))
        for tensor, to in sends:
            number = self.native.send(tensor.data_ptr(), tensor.nbytes, to)
            waits.append((self.native.wait_sent, to, number, tensor))
        return ShmPending(self.birthplace, waits, self.deadlines.operation)

    def channel(self, open_channel: Callable[[str], Channel]) -> ShmChannel:
        return ShmChannel(self, open_channel)

    def connect(self, ranks: tuple[int, ...], name: str) -> ShmTransport:
        """Where its members meet follows from their ranks and the name, so nothing is sent before."""
        meeting = self.meeting.aside(f"{name} of {ranks}")
        return ShmTransport(meeting, ranks.index(self.rank), self.group.among(ranks), self.deadlines)

    def close(self, drain: bool) -> None:
        self.native.close(drain)
        self.waiter.close(drain=False)

    def rows(self, flat: Tensor, collective: str) -> Rows:
        """The compiled schedule; sums of 16-bit types are kept in fp32, so elements are at least four bytes."""
        itemsize = max(flat.element_size(), 4)
        schedule = schedule_of(collective, self.world, self.group.hosts)
        segment, grain = self.segment_bytes // itemsize, self.grain_bytes // itemsize
        return compile_rows(schedule, self.rank, flat.numel(), segment, grain)


def shm_fabric(meeting: Meeting, rank: int, world: int, deadlines: Deadlines | None = None) -> Fabric:
    """The fabric of one rank, which returns when all have met."""
    return Fabric(ShmTransport(meeting, rank, Group.on_hosts([0] * world), deadlines or Deadlines()))


class ShmHealth(Health):
    """Progress and abort are words in shared memory; who died, the native core sees by itself."""

    def __init__(self, native: _native.Group, world: int, birthplace: Birthplace) -> None:
        self.native = native
        self.world = world
        self.birthplace = birthplace

    def publish(self, progress: RankProgress) -> None:
        self.birthplace.require()
        self.native.write_note(progress)

    def progress_of(self, rank: int) -> RankProgress:
        return RankProgress(*self.native.note_of(check_rank(rank, self.world)))

    def abort(self, why: str) -> None:
        self.native.abort(why)


class ShmCalls(Calls):
    """Calls of the native core, which compares them itself."""

    def __init__(self, transport: ShmTransport) -> None:
        self.transport = transport
        self.native = transport.native

    def all_reduce(self, tensor: Tensor, op: Op, collective: str) -> None:
        flat = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        count, dtype, code = flat.numel(), DTYPE_CODES[flat.dtype], OP_CODES[op]
        if collective == "auto":
            self.native.all_reduce(flat.data_ptr(), count, dtype, code, collective)
        else:
            rows = self.transport.rows(flat, collective)
            self.native.run_schedule(flat.data_ptr(), count, dtype, code, rows, collective)
        if flat is not tensor:
            tensor.detach().copy_(flat)

    def start_all_reduce(self, tensor: Tensor, op: Op, collective: str) -> ShmHandle:
        flat = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        count, dtype, code = flat.numel(), DTYPE_CODES[flat.dtype], OP_CODES[op]
        if collective == "auto":
            handle = self.native.submit(flat.data_ptr(), count, dtype, code, collective)
        else:
            rows = self.transport.rows(flat, collective)
            handle = self.native.submit_schedule(flat.data_ptr(), count, dtype, code, rows, collective)
        return ShmHandle(self.transport, handle, tensor, flat)

    def reduce_scatter(self, tensor: Tensor, op: Op) -> Tensor:
        """The native call wants equal slices, so the end is filled up."""
        world, rank = self.transport.world, self.transport.rank
        bounds = boundaries(tensor.numel(), world)
        size = bounds[1]
        given = tensor.detach().contiguous().view(-1)
        if size * world != given.numel():
            given = torch.cat([given, given.new_zeros(size * world - given.numel())])
        taken = torch.empty(size, dtype=tensor.dtype)
        code = DTYPE_CODES[tensor.dtype]
        self.native.reduce_scatter(given.data_ptr(), taken.data_ptr(), size, code, OP_CODES[op], f"{tensor.numel()}")
        return taken[: bounds[rank + 1] - bounds[rank]]

    def all_gather(self, tensor: Tensor) -> Tensor:
        given = tensor.detach().contiguous()
        gathered = tensor.new_empty(self.transport.world, *tensor.shape)
        self.native.all_gather(given.data_ptr(), gathered.data_ptr(), given.numel(), DTYPE_CODES[given.dtype])
        return gathered

    def broadcast(self, flat: Tensor, root: int) -> None:
        self.native.broadcast(flat.data_ptr(), flat.numel(), DTYPE_CODES[flat.dtype], root)

    def all_to_all(self, flat: Tensor) -> Tensor:
        taken = torch.empty_like(flat)
        part = flat.numel() // self.transport.world
        self.native.all_to_all(flat.data_ptr(), taken.data_ptr(), part, DTYPE_CODES[flat.dtype])
        return taken

    def barrier(self) -> None:
        self.native.barrier()


class ShmChannel(Channel):
    """Calls in the hands of the native worker thread, which carries them out in their order."""

    transport: ShmTransport

    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> ShmHandle:
        return ShmCalls(self.transport).start_all_reduce(tensor, op, collective)

    def _all_gather(self, gathered: Tensor, own: Tensor) -> ShmHandle:
        handle = self.transport.native.submit_all_gather(
            own.data_ptr(), gathered.data_ptr(), own.numel(), DTYPE_CODES[own.dtype]
        )
        return ShmHandle(self.transport, handle, gathered, gathered).keeping(own)

    def _exchange(self, taken: Tensor, parts: Tensor) -> ShmHandle:
        handle = self.transport.native.submit_all_to_all(
            parts.data_ptr(), taken.data_ptr(), parts.numel() // self.world, DTYPE_CODES[parts.dtype]
        )
        return ShmHandle(self.transport, handle, taken, taken).keeping(parts)


class ShmPending:
    """Messages under way; the tensors are kept alive until they have arrived."""

    def __init__(self, birthplace: Birthplace, waits: list[tuple[Wait, int, int, Tensor]], deadline_s: float) -> None:
        self.birthplace = birthplace
        self.waits = waits
        self.deadline_s = deadline_s

    def wait(self, deadline_s: float | None = None) -> None:
        """Wait for all of them, receives first."""
        self.birthplace.require()
        while self.waits:
            wait, peer, number, _ = self.waits.pop(0)
            wait(peer, number, deadline_s or self.deadline_s)


class ShmHandle:
    """A call in the hands of the native worker thread; its tensors are kept alive until it is done."""

    def __init__(self, transport: ShmTransport, native: _native.Handle, tensor: Tensor, flat: Tensor) -> None:
        self.transport = transport
        self.native = native
        self.tensor = tensor
        self.flat = flat
        self.sent: Tensor | None = None

    def keeping(self, sent: Tensor) -> ShmHandle:
        """Keep alive what is sent, too."""
        self.sent = sent
        return self

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when it is done; raise what it raised."""
        self.transport.birthplace.require()
        if deadline_s is None:
            while not self.native.wait(SIGNALS_S):  # Python looks for Ctrl-C in between
                pass
        elif not self.native.wait(deadline_s):
            raise FabricError(not_done_message("a collective", deadline_s, self.transport.deadlines.operation))
        if self.flat is not self.tensor:
            self.tensor.detach().copy_(self.flat)
            self.flat = self.tensor

    def done(self) -> bool:
        """Whether it is over, one way or another."""
        return self.native.done()

    def on_done(self, call: Callable[[], None]) -> None:
        """Have something called when it is over, by a thread that waits for such calls in their order."""

        def wait() -> Times:
            with suppress(FabricError):
                self.native.wait()
            call()
            return Times(0, 0, 0)

        self.transport.waiter.submit(wait, "a collective", self.transport.deadlines.operation)

    def lends_thread(self) -> bool:
        """The thread that waits may go on: the collectives themselves have another one."""
        return True

    def times(self) -> Times:
        """When it happened."""
        return Times(*self.native.times())

    def finite(self) -> bool | None:
        """Whether no element of the result is infinite or NaN; known without a schedule, where there are peers."""
        return self.native.finite()
