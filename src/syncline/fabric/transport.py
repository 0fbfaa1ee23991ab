"""Transport: what a kind of fabric must offer, which is how bytes move between the ranks of one group.

    messages    post                                 the executor runs schedules over them
    calls       what users call: compared, blocking  along schedules, or natively
    channels    collectives that only start          along schedules, natively, or by an engine
    memory      buffer                               where peers can reach it, if they can
    health      progress, failure, abort
    connect     another transport between some of the ranks, with an order of calls of its own

A transport that moves messages gets its collectives from the executor, and needs `post`, `connect` and `health`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from syncline.collectives.execute import Pending, Scratch
from syncline.collectives.registry import cheapest
from syncline.core.group import Group
from syncline.errors import FabricClosed
from syncline.fabric.call_thread import CallThread
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.forked import Birthplace
from syncline.fabric.health import Health

if TYPE_CHECKING:
    from syncline.fabric.calls import Calls
    from syncline.fabric.channel import Channel

Messages = Sequence[tuple[Tensor, int]]  # tensors, and to whom or from whom


class Transport(ABC):
    """One rank's end of a group whose calls have one order."""

    name: str
    latency_s: ClassVar[float] = 150e-6  # of one message: what `auto` assumes
    bytes_per_s: ClassVar[float] = 1e9  # of one link: what `auto` assumes
    segment_bytes: int = 4 << 20  # larger has fewer messages, smaller overlaps better
    grain_bytes: int = 4096  # chunks are cut at multiples of it; small buffers have fewer chunks
    has_engine: ClassVar[bool] = False  # an all-reduce of its own, that `collective="engine"` names
    receives_ahead: bool = True  # receives may be posted before the sends that leave at the same time
    incarnation: int = 0  # how many processes had this rank before; 0 is the first start

    health: Health

    def __init__(self, rank: int, group: Group, deadlines: Deadlines) -> None:
        self.rank = rank
        self.group = group
        self.world = group.world
        self.deadlines = deadlines
        self.birthplace = Birthplace()
        self.device = torch.device("cpu")

    @property
    def outlived(self) -> bool:
        """Whether the process group below is no longer one."""
        return False

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat tensor, in memory that peers can reach where there is such a thing."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def auto(self, nbytes: int) -> str:
        """The algorithm for `"auto"`."""
        return cheapest(nbytes, self.world, self.group.hosts, self.latency_s, self.bytes_per_s)

    @abstractmethod
    def post(self, sends: Messages, receives: Messages) -> Pending:
        """Start messages that are in flight together. Between two ranks they match in the order of posting."""

    @abstractmethod
    def calls(self) -> Calls:
        """The collectives that users call."""

    @abstractmethod
    def channel(self, open_channel: Callable[[str], Channel]) -> Channel:
        """Collectives that only start; `open_channel` makes another channel between the same ranks under a name."""

    @abstractmethod
    def connect(self, ranks: tuple[int, ...], name: str) -> Transport:
        """A transport between some ranks, under a name that they use once."""

    @abstractmethod
    def close(self, drain: bool) -> None:
        """Give back what this rank holds, after what was started or without it."""


class MessageTransport(Transport):
    """A transport whose collectives go along schedules, as messages, in a thread of their own or in the caller's."""

    def __init__(self, rank: int, group: Group, deadlines: Deadlines) -> None:
        super().__init__(rank, group, deadlines)
        self.scratch = Scratch()
        self.thread = CallThread(f"rank {rank} communicates")
        self.call_count = 0
        self.during = "nothing"

    def begin_call(self, call: str) -> None:
        """Count a call, unless none can be made any more."""
        if self.health.failure is not None:
            raise self.health.failure
        self.call_count += 1
        self.during = call

    def enter_round(self, number: int) -> None:
        """A round begins: its messages are posted next."""

    def close(self, drain: bool) -> None:
        self.thread.close(drain)
        self.health.failure = FabricClosed("the fabric is closed; make a new one")
