"""Threads: any number of ranks in one process, with faults by script. For tests, notebooks and your own test suite.

    from syncline import run
    from syncline.fabric.threads import Dies, Threads

    def work(fabric):
        return fabric.all_reduce(torch.ones(10), collective="ring")

    run(work, ranks=5, fabric="threads")                                       # five ranks, no process started
    run(work, ranks=5, fabric=Threads(faults=[Dies(rank=2, round=1)]))         # raises, naming rank 2
    run(work, ranks=5, fabric=Threads(host_sizes=[2, 3]))                      # as if on two hosts

It is stricter than a network: what is sent is read when the receiver takes it, not before, so a buffer that is changed
too early gives wrong answers here every time and not once in a thousand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from syncline.collectives.schedule import Hosts, hosts_of_sizes
from syncline.errors import ConfigError, Desync, PeerError
from syncline.fabric.blame import Kind, culprit, peer_error
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.messages import MessageFabric


class ScriptedDeath(Exception):
    """Raised in a rank that a script lets die."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that befalls `rank` when it enters `round` of its collective number `call`."""

    rank: int
    round: int = 0
    call: int = 1  # the first collective is 1

    def strike(self, fabric: ThreadsFabric) -> None:
        """Let it happen, in the thread of that rank."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Dies(Fault):
    """The rank ends there and then."""

    def strike(self, fabric: ThreadsFabric) -> None:
        raise ScriptedDeath(f"rank {self.rank} dies by script in round {self.round} of {fabric.during}")


@dataclass(frozen=True, kw_only=True)
class Stalls(Fault):
    """The rank does nothing until everybody else has given up on it."""

    def strike(self, fabric: ThreadsFabric) -> None:
        fabric.group.sleep_until_failure()


@dataclass(frozen=True, kw_only=True)
class SendsLate(Fault):
    """The rank is late by some seconds, and then goes on."""

    seconds: float = 0.1

    def strike(self, fabric: ThreadsFabric) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Threads:
    """How to set up a group of threads: give it to `run` as `fabric`."""

    faults: Sequence[Fault] = ()
    host_sizes: Sequence[int] = ()  # ranks on each pretended host; empty: one host
    deadlines: Deadlines = field(default_factory=Deadlines)

    def group(self, world: int) -> ThreadGroup:
        """The shared part of all ranks."""
        hosts = hosts_of_sizes(self.host_sizes or [world])
        if sum(map(len, hosts)) != world:
            raise ConfigError(f"host_sizes={list(self.host_sizes)} add up to {sum(map(len, hosts))}, not {world}")
        return ThreadGroup(world, hosts, self.faults, self.deadlines)


@dataclass
class Message:
    """A tensor on its way; it is read when it is taken."""

    tensor: Tensor
    taken: bool = False


@dataclass
class Channel:
    """The messages from one rank to another, numbered on both sides."""

    messages: dict[int, Message] = field(default_factory=dict)
    sent: int = 0
    expected: int = 0


class ThreadGroup:
    """What the ranks of one process share: the channels, and the board that says who waits for whom."""

    def __init__(self, world: int, hosts: Hosts, faults: Sequence[Fault], deadlines: Deadlines) -> None:
        self.world = world
        self.hosts = hosts
        self.faults = faults
        self.deadlines = deadlines
        self.lock = threading.Lock()
        self.wake = [threading.Condition(self.lock) for _ in range(world)]
        self.channels = {(src, dst): Channel() for src in range(world) for dst in range(world)}
        self.waits_for: dict[int, int] = {}
        self.gone: set[int] = set()
        self.failure: PeerError | None = None

    def fabric(self, rank: int) -> ThreadsFabric:
        """One rank's end."""
        return ThreadsFabric(self, rank)

    def leave(self, rank: int) -> None:
        """A rank ends, one way or another; whoever waits for it is told."""
        with self.lock:
            self.gone.add(rank)
            self.notify_all()

    def fail(self, rank: int, peer: int, during: str, waited_s: float) -> PeerError:
        """Blame someone, once: the first verdict is everyone's. The lock is held."""
        if self.failure is None:
            guilty = culprit(peer, self.waits_for.get)
            kind: Kind = "lost" if guilty in self.gone else "stalled"
            self.failure = peer_error(kind, guilty, rank, during, waited_s)
            self.notify_all()
        return type(self.failure)(self.failure.rank, self.failure.message)

    def notify_all(self) -> None:
        """Wake every rank. The lock is held."""
        for condition in self.wake:
            condition.notify_all()

    def sleep_until_failure(self) -> None:
        """What a stalled rank does."""
        with self.lock:
            while self.failure is None:
                self.wake[0].wait(0.05)


class ThreadsFabric(MessageFabric):
    """One rank of a group of threads."""

    name: ClassVar[str] = "threads"
    latency_s: ClassVar[float] = 50e-6
    bytes_per_s: ClassVar[float] = 5e9

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        super().__init__(rank, group.world, group.hosts, group.deadlines)
        self.group = group

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> ThreadsPending:
        sending: list[tuple[Message, int]] = []
        receiving: list[tuple[Tensor, int, int]] = []
        with self.group.lock:
            for tensor, to in sends:
                channel = self.group.channels[self.rank, to]
                message = Message(tensor)
                channel.messages[channel.sent] = message
                channel.sent += 1
                sending.append((message, to))
                self.group.wake[to].notify_all()
            for tensor, source in receives:
                channel = self.group.channels[source, self.rank]
                receiving.append((tensor, source, channel.expected))
                channel.expected += 1
        return ThreadsPending(self, sending, receiving)

    def enter_round(self, number: int) -> None:
        for fault in self.group.faults:
            if (fault.rank, fault.call, fault.round) == (self.rank, self.calls, number):
                fault.strike(self)

    def close(self) -> None:
        self.group.leave(self.rank)
        super().close()


class ThreadsPending:
    """Messages between threads under way."""

    def __init__(
        self,
        fabric: ThreadsFabric,
        sending: list[tuple[Message, int]],
        receiving: list[tuple[Tensor, int, int]],
    ) -> None:
        self.fabric = fabric
        self.sending = sending
        self.receiving = receiving

    def wait(self, deadline_s: float | None = None) -> None:
        """Take what arrives, then see that all that was sent has been taken."""
        until = time.monotonic() + (deadline_s or self.fabric.deadlines.operation)
        while self.receiving:
            tensor, source, number = self.receiving[0]
            self._take(tensor, source, number, until)
            self.receiving.pop(0)
        while self.sending:
            message, to = self.sending[0]
            with self.fabric.group.lock:
                while not message.taken:
                    self._sleep(to, until)
            self.sending.pop(0)

    def _take(self, tensor: Tensor, source: int, number: int, until: float) -> None:
        group, rank = self.fabric.group, self.fabric.rank
        channel = group.channels[source, rank]
        with group.lock:
            while number not in channel.messages:
                self._sleep(source, until)
            message = channel.messages.pop(number)
        if message.tensor.numel() != tensor.numel() or message.tensor.dtype != tensor.dtype:
            raise Desync(
                f"rank {source} sent {message.tensor.dtype}[{message.tensor.numel()}] to rank {rank}, "
                f"which expected {tensor.dtype}[{tensor.numel()}]"
            )
        tensor.copy_(message.tensor)
        with group.lock:
            message.taken = True
            group.wake[source].notify_all()

    def _sleep(self, peer: int, until: float) -> None:
        """Sleep until something changes; raise where it never will. The lock is held."""
        fabric, group = self.fabric, self.fabric.group
        left = until - time.monotonic()
        if group.failure is None and peer not in group.gone and left > 0:
            group.waits_for[fabric.rank] = peer
            group.wake[fabric.rank].wait(left)
            if group.failure is None and time.monotonic() < until:
                del group.waits_for[fabric.rank]
            return
        error = group.fail(fabric.rank, peer, fabric.during, fabric.deadlines.operation - left)
        fabric.broken = error
        raise error
