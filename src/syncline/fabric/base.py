"""What every fabric offers.

A call is checked here and then carried out by the fabric: with messages along a schedule (`messages.py`), or in memory
that all ranks share (`shm.py`). Every collective starts with an agreement: ranks compare what they are about to do, and
if they differ all of them raise `Desync` before any data has moved. After that the fabric is still usable. After a lost
or stalled peer it is not: every later call raises the same error again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from syncline.collectives.execute import OPS, Op, Pending
from syncline.collectives.flat import Algorithm
from syncline.collectives.registry import algorithm, cheapest, schedule_of
from syncline.collectives.schedule import Hosts
from syncline.errors import ConfigError, FabricClosed, UnknownName
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.forked import Birthplace
from syncline.fabric.hosts import hosts_among
from syncline.specs import text_of

if TYPE_CHECKING:
    from syncline.fabric.channel import Channel
    from syncline.fabric.newcomers import Door, Doors

MOST_NAME_BYTES = 100  # of an algorithm with its settings; ranks compare it in full
Note = tuple[int, int, int, int]
NO_NOTE: Note = (0, 0, 0, 0)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)


class Handle(Protocol):
    """A collective that was started and may still be under way."""

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when it is done; raise what it raised, or `FabricError` when it takes longer than the deadline."""

    def done(self) -> bool:
        """Whether it is over, one way or another."""

    def times(self) -> Times:
        """When it happened; meaningful once it is done."""

    def finite(self) -> bool | None:
        """Whether no element of the result is infinite or NaN, the same on every rank; None where that is not known."""

    def on_done(self, call: Callable[[], None]) -> None:
        """Have something called when it is over, one way or another, in whichever thread; at once if it is."""


class Times(NamedTuple):
    """Of one call, in nanoseconds of `time.monotonic_ns`."""

    began_ns: int
    met_ns: int  # all ranks had arrived
    ended_ns: int


class Ended(NamedTuple):
    """What is known of a call that went well."""

    times: Times
    finite: bool | None = None


class Fabric(ABC):
    """How bytes move between ranks."""

    name: ClassVar[str]
    latency_s: ClassVar[float] = 150e-6  # of one message: what `auto` assumes
    bytes_per_s: ClassVar[float] = 1e9  # of one link: what `auto` assumes
    segment_bytes: int = 4 << 20  # larger has fewer messages, smaller overlaps better
    has_engine: ClassVar[bool] = False  # an all-reduce of its own, that `collective="engine"` names
    receives_ahead: bool = True  # receives may be posted before the sends that leave at the same time
    grain_bytes: ClassVar[int] = 4096  # chunks are cut at multiples of it; small buffers have fewer chunks

    def __init__(self, rank: int, world: int, hosts: Hosts, deadlines: Deadlines) -> None:
        self.rank = rank
        self.world = world
        self.hosts = hosts
        self.deadlines = deadlines
        self.birthplace = Birthplace()
        self.device = torch.device("cpu")
        self.siblings: list[Fabric] = []  # and subgroups: what is closed with this fabric
        self.siblings_made = 0
        self.subgroups_made: Counter[tuple[int, ...]] = Counter()
        self.is_closed = False
        self.incarnation = 0  # how many processes had this rank before; 0 is the first start
        self.in_join = False  # a `Sync` on it is, which keeps company to one model alone
        self.path: tuple[int, ...] = ()  # which sibling of which sibling this is
        self.doors: Doors | None = None  # where newcomers are possible
        self.before_close: list[Callable[[bool], None]] = []  # of whoever works with this fabric, told of `drain`
        self.at_close: list[Callable[[], None]] = []  # the same, when nothing is under way any more

    @property
    def outlived(self) -> bool:
        """Whether the process group that this fabric was made over is no longer one."""
        return False

    def sibling(self) -> Self:
        """Another fabric between the same ranks, whose calls need no common order with those of this one.

        All ranks make the same siblings in the same order. A sibling is closed with the fabric it was made from.
        """
        self.birthplace.require()
        made = self._sibling()
        made.path = (*self.path, self.siblings_made)
        made.doors = self.doors
        self.siblings_made += 1
        return self._keep(made)

    def subgroup(self, ranks: Sequence[int]) -> Self:
        """A fabric between some ranks of this one: rank 0 of it is the first of `ranks`, and so on.

            if fabric.rank in (1, 3):
                pair = fabric.subgroup([1, 3])

        Only its members make it, all with the same `ranks`; the same ranks again give another fabric. Neither making it
        nor its calls need a common order with the calls of this one, and it fails by itself: when a rank dies or
        stalls, this fabric and the subgroups with that rank are broken, and the others go on. Its errors count ranks as
        it does. It is closed with the fabric it was made from.
        """
        members = self._members(ranks)
        number = self.subgroups_made[members]
        self.subgroups_made[members] += 1
        made = self._subgroup(members, number)
        made.hosts = hosts_among(self.hosts, members)
        return self._keep(made)

    def channel(self) -> Channel:
        """The collectives of this fabric as calls that only start and are not compared; there is one order of both."""
        self.birthplace.require()
        return self._channel()

    def abort(self, why: str) -> None:
        """End what is under way, and all that comes, here and on the other ranks; `why` is what they are told."""
        if self.birthplace.is_here() and not self.is_closed:
            self._abort(f"rank {self.rank} {why}")
            for sibling in [*self.siblings]:
                sibling.abort(why)

    def door(self) -> Door | None:
        """Where ranks that come later find this one; None where there can be no newcomers."""
        return self.doors.open(self.place_of(self.rank)) if self.doors is not None else None

    def knock_at(self, rank: int) -> Fabric:
        """On a newcomer: the fabric of two with a rank that was there before it, in which that one is 0."""
        raise ConfigError(f"rank {self.rank} was there from the start and need not knock; use subgroup()")

    def place_of(self, rank: int) -> str:
        """The door of a rank in this fabric, by the same name on all ranks."""
        return f"{self.path}/rank {rank}"

    def with_engine(self) -> Fabric:
        """The fabric that can hand tensors to an engine's own all-reduce."""
        raise ConfigError(f'collective="engine" needs an engine; the {self.name} fabric has none: use "auto"')

    def close(self, drain: bool = True) -> None:
        """Give back what this rank holds. Safe to call twice.

        With `drain` it waits for what was started; otherwise what is under way fails, here and on the other ranks. In a
        forked child all of it is the parent's, and is left alone.
        """
        if not self.birthplace.is_here():
            return
        self.finish(drain)
        for sibling in [*self.siblings]:
            sibling.close(drain)
        self.is_closed = True
        self._close(drain)
        while self.at_close:
            self.at_close.pop()()

    def finish(self, drain: bool = True) -> None:
        """Let whoever works with this fabric and its siblings come to an end, which with `drain` is an orderly one."""
        while self.before_close and self.birthplace.is_here():
            self.before_close.pop()(drain)
        for sibling in [*self.siblings]:
            sibling.finish(drain)

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A zeroed flat tensor, in memory that peers can reach where there is such a thing."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start sending; the tensor may be changed again after `wait`."""
        return self.post([(flat_view(tensor), self._peer(to))], [])

    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Start receiving a tensor of the same size and dtype; it may be read after `wait`."""
        return self.post([], [(flat_view(tensor), self._peer(source))])

    def all_reduce(self, tensor: Tensor, op: Op = "sum", collective: str | Algorithm = "auto") -> Tensor:
        """Replace `tensor` on every rank by the sum, mean or maximum over ranks; the same bits everywhere.

        `collective` is an algorithm (`"ring"`, `"tree:arity=4"`, `Ring()`), `"engine"` for the engine's own where there
        is an engine, or `"auto"`. Integers are divided towards zero by `op="mean"`.
        """
        self._check(tensor, op)
        self._all_reduce(tensor, op, self._collective(collective, tensor))
        return tensor

    def all_reduce_async(self, tensor: Tensor, op: Op = "sum", collective: str | Algorithm = "auto") -> Handle:
        """Start an all-reduce and return at once. Calls take effect in the order in which they were made.

        The tensor belongs to the call until `wait` has returned.
        """
        self._check(tensor, op)
        return self._all_reduce_async(tensor, op, self._collective(collective, tensor))

    def reduce_scatter(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """This rank's slice of the flat sum, mean or maximum: ceil(n / W) elements, fewer at the end."""
        self._check(tensor, op)
        return self._reduce_scatter(tensor, op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Everyone's tensor, stacked in order of rank."""
        self._check(tensor)
        return self._all_gather(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Replace `tensor` on every rank by that of `root`."""
        self._check(tensor)
        self._peer(root)
        flat = tensor.detach().contiguous().view(-1)
        self._broadcast(flat, root)
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
        return self._all_to_all(tensor.detach().contiguous().view(-1)).view(tensor.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    # What a fabric does its own way.

    @abstractmethod
    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Pending:
        """Start messages that are in flight together. Between two ranks they match in the order of posting."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def write_note(self, note: Note) -> None:
        """Say of this rank what the others can read at any time, also after it was killed or stopped."""

    @abstractmethod
    def note_of(self, rank: int) -> Note:
        """What a rank has noted last; it may be a second old."""

    @abstractmethod
    def _channel(self) -> Channel: ...

    @abstractmethod
    def _abort(self, why: str) -> None: ...

    @abstractmethod
    def _sibling(self) -> Self: ...

    @abstractmethod
    def _subgroup(self, ranks: tuple[int, ...], number: int) -> Self:
        """The fabric that these ranks make when they have made `number` others before."""

    @abstractmethod
    def _close(self, drain: bool) -> None: ...

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> None: ...

    @abstractmethod
    def _all_reduce_async(self, tensor: Tensor, op: Op, collective: str) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, tensor: Tensor, op: Op) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    def _broadcast(self, flat: Tensor, root: int) -> None: ...

    @abstractmethod
    def _all_to_all(self, flat: Tensor) -> Tensor: ...

    def _auto(self, nbytes: int) -> str:
        """The algorithm for `"auto"`."""
        return cheapest(nbytes, self.world, self.hosts, self.latency_s, self.bytes_per_s)

    def _keep(self, made: Self) -> Self:
        """Close it with this fabric, unless it was closed before."""
        self.siblings.append(made)
        made.at_close.append(lambda: self.siblings.remove(made) if made in self.siblings else None)
        return made

    # What is checked before anything is sent.

    def _members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        self.birthplace.require()
        members = tuple(int(self._peer(rank)) for rank in ranks)
        if self.is_closed:
            raise FabricClosed("the fabric is closed, so it has no subgroups; make a new one")
        if len(set(members)) < len(members):
            raise ConfigError(f"ranks={[*members]} has a rank twice; use {[*dict.fromkeys(members)]}")
        if self.rank not in members:
            raise ConfigError(
                f"rank {self.rank} is not in ranks={[*members]}, and only members make a subgroup; "
                f"ask first: if fabric.rank in ranks"
            )
        return members

    def _collective(self, collective: str | Algorithm, tensor: Tensor) -> str:
        """The text that names the algorithm, the same on all ranks that asked for the same in whatever words."""
        if collective == "auto" or (collective == "engine" and self.world == 1):
            return self._auto(tensor.nbytes)
        if collective == "engine":
            return "engine"
        chosen = algorithm(collective) if isinstance(collective, str) else collective
        text = text_of(chosen.name, chosen)
        if len(text.encode()) > MOST_NAME_BYTES:
            raise ConfigError(f"{text[:40]}... has more than {MOST_NAME_BYTES} bytes, too many for ranks to compare")
        schedule_of(text, self.world, self.hosts)  # what is impossible here is refused here
        return text

    def _check(self, tensor: Tensor, op: str = "sum") -> None:
        self.birthplace.require()
        if op not in OPS:
            raise UnknownName("op", op, OPS)
        if tensor.dtype not in DTYPES:
            known = ", ".join(name_of(dtype) for dtype in DTYPES)
            raise ConfigError(f"{tensor.dtype} cannot be sent; use one of {known}")
        if tensor.is_sparse or tensor.device.type != self.device.type:
            raise ConfigError(
                f"a {tensor.layout} tensor on {tensor.device} cannot be sent; the {self.name} fabric "
                f"takes dense tensors on {self.device.type}"
            )

    def _peer(self, rank: int) -> int:
        if rank not in range(self.world):
            raise ConfigError(f"{rank} is not a rank of this world; ranks are 0..{self.world - 1}")
        return rank


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
