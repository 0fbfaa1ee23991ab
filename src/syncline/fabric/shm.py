"""Shared memory: ranks of one machine read each other's buffers in place. The native core does the work.

A tensor from `buffer()` lies in memory that all ranks have mapped, so an all-reduce copies nothing before it adds; any
other tensor is staged through such memory in pieces. Every algorithm runs natively from its schedule; `auto` is the
fabric's own: each rank owns a slice, adds it over all buffers in rank order 0..W-1 and writes the result to all.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from syncline.collectives.execute import Op
from syncline.collectives.registry import schedule_of
from syncline.collectives.rows import Rows, compile_rows
from syncline.collectives.schedule import boundaries, hosts_of_sizes
from syncline.errors import ConfigError, FabricError
from syncline.fabric.base import Fabric, Note, Times
from syncline.fabric.channel import Channel
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.forked import Birthplace
from syncline.fabric.torch import TorchFabric
from syncline.fabric.worker import Worker

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


class ShmFabric(Fabric):
    """One rank of a group that shares memory."""

    name: ClassVar[str] = "shm"
    segment_bytes: int = 256 << 10

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        world: int,
        deadlines: Deadlines | None = None,
        engine: TorchFabric | None = None,
    ) -> None:
        if reason := missing():
            raise ConfigError(f"there is no shared-memory fabric: {reason}")
        if world > MOST_RANKS:
            raise ConfigError(f'{world} ranks are more than {MOST_RANKS}; use fabric="torch"')
        from syncline import _native

        deadlines = deadlines or Deadlines()
        super().__init__(rank, world, hosts_of_sizes([world]), deadlines)
        self.engine = engine
        self.meeting = meeting
        self.waiter = Worker(f"rank {rank} waits")  # for calls of the native thread that somebody wants to be told of
        self.group: _native.Group = _native.Group(
            meeting.address, rank, world, meeting.nonce, deadlines.operation, deadlines.join
        )

    @property
    def outlived(self) -> bool:
        return self.engine is not None and self.engine.outlived

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A zeroed flat tensor that peers reach in place. The memory lives as long as the tensor."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        return torch.from_numpy(self.group.buffer(numel * dtype.itemsize)).view(dtype)

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> ShmPending:
        self.birthplace.require()
        waits: list[tuple[Wait, int, int, Tensor]] = []
        for tensor, source in receives:
            number = self.group.receive(tensor.data_ptr(), tensor.nbytes, source)
            waits.append((self.group.wait_received, source, number, tensor))
        for tensor, to in sends:
            number = self.group.send(tensor.data_ptr(), tensor.nbytes, to)
            waits.append((self.group.wait_sent, to, number, tensor))
        return ShmPending(self.birthplace, waits, self.deadlines.operation)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.group.barrier()

    def write_note(self, note: Note) -> None:
        self.birthplace.require()
        self.group.write_note(note)

    def note_of(self, rank: int) -> Note:
        first, second, third, fourth = self.group.note_of(self._peer(rank))
        return first, second, third, fourth

    def _channel(self) -> Channel:
        return ShmChannel(self)

    def _abort(self, why: str) -> None:
        self.group.abort(why)

    def _sibling(self) -> ShmFabric:
        """Rank 0 says where to meet. The engine stays with the first one."""
        nonce = torch.tensor(list(Meeting().nonce), dtype=torch.int32)
        self.broadcast(nonce)
        return ShmFabric(Meeting(bytes(nonce.tolist())), self.rank, self.world, self.deadlines)

    def _subgroup(self, ranks: tuple[int, ...], number: int) -> ShmFabric:
        meeting = self.meeting.aside(f"{number} of {ranks}")
        return ShmFabric(meeting, ranks.index(self.rank), len(ranks), self.deadlines)

    def _close(self, drain: bool) -> None:
        self.group.close(drain)
        self.waiter.close(drain=False)
        if self.engine is not None:
            self.engine.close(drain)

    def _auto(self, nbytes: int) -> str:
        return "auto"

    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> None:
        if collective == "engine":
            self.with_engine().all_reduce(tensor, op, collective)
            return
        flat = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        count, dtype, code = flat.numel(), DTYPE_CODES[flat.dtype], OP_CODES[op]
        if collective == "auto":
            self.group.all_reduce(flat.data_ptr(), count, dtype, code, collective)
        else:
            self.group.run_schedule(flat.data_ptr(), count, dtype, code, self._rows(flat, collective), collective)
        if flat is not tensor:
            tensor.detach().copy_(flat)

    def _all_reduce_async(self, tensor: Tensor, op: Op, collective: str) -> ShmHandle:
        if collective == "engine":
            raise ConfigError('collective="engine" cannot be started asynchronously here; use "auto"')
        flat = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        count, dtype, code = flat.numel(), DTYPE_CODES[flat.dtype], OP_CODES[op]
        if collective == "auto":
            native = self.group.submit(flat.data_ptr(), count, dtype, code, collective)
        else:
            rows = self._rows(flat, collective)
            native = self.group.submit_schedule(flat.data_ptr(), count, dtype, code, rows, collective)
        return ShmHandle(self, native, tensor, flat)

    def _reduce_scatter(self, tensor: Tensor, op: Op) -> Tensor:
        """The native call wants equal slices, so the end is filled up."""
        bounds = boundaries(tensor.numel(), self.world)
        size = bounds[1]
        given = tensor.detach().contiguous().view(-1)
        if size * self.world != given.numel():
            given = torch.cat([given, given.new_zeros(size * self.world - given.numel())])
        taken = torch.empty(size, dtype=tensor.dtype)
        code = DTYPE_CODES[tensor.dtype]
        self.group.reduce_scatter(given.data_ptr(), taken.data_ptr(), size, code, OP_CODES[op], f"{tensor.numel()}")
        return taken[: bounds[self.rank + 1] - bounds[self.rank]]

    def _all_gather(self, tensor: Tensor) -> Tensor:
        given = tensor.detach().contiguous()
        gathered = tensor.new_empty(self.world, *tensor.shape)
        self.group.all_gather(given.data_ptr(), gathered.data_ptr(), given.numel(), DTYPE_CODES[given.dtype])
        return gathered

    def _broadcast(self, flat: Tensor, root: int) -> None:
        self.group.broadcast(flat.data_ptr(), flat.numel(), DTYPE_CODES[flat.dtype], root)

    def _all_to_all(self, flat: Tensor) -> Tensor:
        taken = torch.empty_like(flat)
        part = flat.numel() // self.world
        self.group.all_to_all(flat.data_ptr(), taken.data_ptr(), part, DTYPE_CODES[flat.dtype])
        return taken

    def with_engine(self) -> TorchFabric:
        if self.engine is None:
            raise ConfigError('collective="engine" needs a process group; start with torchrun, or use "auto"')
        return self.engine

    def _rows(self, flat: Tensor, collective: str) -> Rows:
        """The compiled schedule; sums of 16-bit types are kept in fp32, so elements are at least four bytes."""
        itemsize = max(flat.element_size(), 4)
        schedule = schedule_of(collective, self.world, self.hosts)
        segment, grain = self.segment_bytes // itemsize, self.grain_bytes // itemsize
        return compile_rows(schedule, self.rank, flat.numel(), segment, grain)


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

    def __init__(self, fabric: ShmFabric, native: _native.Handle, tensor: Tensor, flat: Tensor) -> None:
        self.fabric = fabric
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
        self.fabric.birthplace.require()
        if deadline_s is None:
            while not self.native.wait(SIGNALS_S):  # Python looks for Ctrl-C in between
                pass
        elif not self.native.wait(deadline_s):
            raise FabricError(
                f"a collective is not done after {deadline_s} s; it goes on, and fails by itself when a rank is "
                f"{self.fabric.deadlines.operation} s late"
            )
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

        self.fabric.waiter.submit(wait, "a collective", self.fabric.deadlines.operation)

    def times(self) -> Times:
        """When it happened."""
        return Times(*self.native.times())

    def finite(self) -> bool | None:
        """Whether no element of the result is infinite or NaN; known without a schedule, where there are peers."""
        return self.native.finite()


class ShmChannel(Channel):
    """Calls in the hands of the native worker thread, which carries them out in their order."""

    fabric: ShmFabric

    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> ShmHandle:
        return self.fabric._all_reduce_async(tensor, op, collective)

    def _all_gather(self, gathered: Tensor, own: Tensor) -> ShmHandle:
        native = self.fabric.group.submit_all_gather(
            own.data_ptr(), gathered.data_ptr(), own.numel(), DTYPE_CODES[own.dtype]
        )
        return ShmHandle(self.fabric, native, gathered, gathered).keeping(own)

    def _exchange(self, taken: Tensor, parts: Tensor) -> ShmHandle:
        native = self.fabric.group.submit_all_to_all(
            parts.data_ptr(), taken.data_ptr(), parts.numel() // self.fabric.world, DTYPE_CODES[parts.dtype]
        )
        return ShmHandle(self.fabric, native, taken, taken).keeping(parts)
