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

Ranks share what a process has only one of. Torch's generator is such a thing: between `torch.manual_seed` and what one
rank draws, another one may seed or draw. Give each rank a `torch.Generator` of its own, and make models before `run`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from syncline.core.group import Group
from syncline.errors import ConfigError, Desync, FabricClosed, PeerAborted, PeerError
from syncline.fabric.base import Fabric
from syncline.fabric.calls import MessageCalls, check_rank
from syncline.fabric.channel import Channel, MessageChannel
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.health import NO_PROGRESS, Health, Kind, RankProgress, culprit, peer_error
from syncline.fabric.transport import Messages, MessageTransport


class ScriptedDeath(Exception):
    """Raised in a rank that a script lets die."""


@dataclass(frozen=True, kw_only=True)
class Fault(ABC):
    """Something that befalls `rank` when it enters `round` of its collective number `call`."""

    rank: int
    round: int = 0
    call: int = 1  # the first collective is 1

    @abstractmethod
    def strike(self, transport: ThreadsTransport) -> None:
        """Let it happen, in the thread of that rank."""


@dataclass(frozen=True, kw_only=True)
class Dies(Fault):
    """The rank ends there and then."""

    def strike(self, transport: ThreadsTransport) -> None:
        raise ScriptedDeath(f"rank {self.rank} dies by script in round {self.round} of {transport.during}")


@dataclass(frozen=True, kw_only=True)
class Stalls(Fault):
    """The rank does nothing until everybody else has given up on it."""

    def strike(self, transport: ThreadsTransport) -> None:
        transport.shared.sleep_until_given_up()


@dataclass(frozen=True, kw_only=True)
class SendsLate(Fault):
    """The rank is late by some seconds, and then goes on."""

    seconds: float = 0.1

    def strike(self, transport: ThreadsTransport) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Threads:
    """How to set up a group of threads: give it to `run` as `fabric`."""

    faults: Sequence[Fault] = ()
    host_sizes: Sequence[int] = ()  # ranks on each pretended host; empty: one host
    deadlines: Deadlines = field(default_factory=Deadlines)

    def group(self, world: int) -> ThreadGroup:
        """The shared part of all ranks."""
        host_of = [host for host, size in enumerate(self.host_sizes or [world]) for _ in range(size)]
        if len(host_of) != world:
            raise ConfigError(f"host_sizes={list(self.host_sizes)} add up to {len(host_of)}, not {world}")
        return ThreadGroup(Group.on_hosts(host_of), self.faults, self.deadlines)


@dataclass(eq=False)
class Message:
    """A tensor on its way; it is read when it is taken."""

    tensor: Tensor
    done: bool = False  # taken by its receiver


@dataclass(eq=False)
class Expected:
    """Where a message is to arrive."""

    tensor: Tensor
    source: int
    number: int
    done: bool = False  # arrived
    problem: str = ""


@dataclass
class Mailbox:
    """The messages from one rank to another, numbered on both sides."""

    messages: dict[int, Message] = field(default_factory=dict)
    sent: int = 0
    expected: int = 0


class ThreadGroup:
    """What the ranks of one process share: mailboxes, who waits for whom, how far each is, and what has failed."""

    def __init__(self, group: Group, faults: Sequence[Fault], deadlines: Deadlines) -> None:
        self.group = group
        self.world = world = group.world
        self.faults = faults
        self.deadlines = deadlines
        self.lock = threading.Lock()
        self.wake = [threading.Condition(self.lock) for _ in range(world)]
        self.mailboxes = {(src, dst): Mailbox() for src in range(world) for dst in range(world)}
        self.waits_for: dict[int, int] = {}
        self.gone: set[int] = set()
        self.progress = [NO_PROGRESS] * world
        self.subgroups: dict[tuple[tuple[int, ...], str], ThreadGroup] = {}
        self.failure: PeerError | None = None
        self.failed: set[int] = set()  # ranks that have raised it, and the one that is to blame: none takes part again

    def fabric(self, rank: int) -> Fabric:
        """One rank's end."""
        return Fabric(ThreadsTransport(self, rank))

    def subgroup(self, ranks: tuple[int, ...], name: str) -> ThreadGroup:
        """A group of some of the ranks; the rank that comes first makes it, and those that are gone never come."""
        with self.lock:
            if (ranks, name) not in self.subgroups:
                faults = [replace(fault, rank=ranks.index(fault.rank)) for fault in self.faults if fault.rank in ranks]
                made = ThreadGroup(self.group.among(ranks), faults, self.deadlines)
                made.gone.update(ranks.index(rank) for rank in self.gone.intersection(ranks))
                self.subgroups[ranks, name] = made
            return self.subgroups[ranks, name]

    def leave(self, rank: int) -> None:
        """A rank ends, one way or another; whoever waits for it is told."""
        with self.lock:
            self.gone.add(rank)
            self.waits_for.pop(rank, None)
            self.notify_all()
            subgroups = [(group, ranks.index(rank)) for (ranks, _), group in self.subgroups.items() if rank in ranks]
        for group, number in subgroups:
            group.leave(number)

    def fail(self, rank: int, peer: int, during: str, waited_s: float) -> PeerError:
        """Blame someone, once: the first verdict is everyone's. The lock is held."""
        if self.failure is None:
            guilty = culprit(peer, self.waits_for.get)
            kind: Kind = "lost" if guilty in self.gone else "stalled"
            self.failure = peer_error(kind, guilty, rank, during, waited_s)
            self.failed.add(guilty)
        self.failed.add(rank)
        self.notify_all()
        return type(self.failure)(self.failure.rank, self.failure.message)

    def abort(self, rank: int, why: str) -> None:
        """End all calls of all ranks, for a reason of one rank's own."""
        with self.lock:
            self.failure = self.failure or PeerAborted(rank, why)
            self.failed.update(range(self.world))
            self.notify_all()

    def notify_all(self) -> None:
        """Wake every rank. The lock is held."""
        for condition in self.wake:
            condition.notify_all()

    def sleep_until_given_up(self) -> None:
        """Sleep as a stalled rank does, until all others have given up on it or have ended.

        One that has not yet noticed the failure could go on, if this rank woke up before.
        """
        with self.lock:
            while self.failure is None:
                self.wake[0].wait(0.05)
            until = time.monotonic() + self.deadlines.operation
            while len(self.failed | self.gone) < self.world and time.monotonic() < until:
                self.wake[0].wait(0.05)


class ThreadsTransport(MessageTransport):
    """One rank of a group of threads."""

    name = "threads"
    latency_s = 50e-6
    bytes_per_s = 5e9

    def __init__(self, shared: ThreadGroup, rank: int) -> None:
        super().__init__(rank, shared.group, shared.deadlines)
        self.shared = shared
        self.expected: list[Expected] = []
        self.health = ThreadsHealth(shared, rank)

    def calls(self) -> MessageCalls:
        return MessageCalls(self)

    def channel(self, open_channel: Callable[[str], Channel]) -> MessageChannel:
        return MessageChannel(self, open_channel)

    def connect(self, ranks: tuple[int, ...], name: str) -> ThreadsTransport:
        return ThreadsTransport(self.shared.subgroup(ranks, name), ranks.index(self.rank))

    def post(self, sends: Messages, receives: Messages) -> ThreadsPending:
        self.birthplace.require()
        sending: list[tuple[Message, int]] = []
        receiving: list[Expected] = []
        with self.shared.lock:
            for tensor, to in sends:
                mailbox = self.shared.mailboxes[self.rank, to]
                message = Message(tensor)
                mailbox.messages[mailbox.sent] = message
                mailbox.sent += 1
                sending.append((message, to))
                self.shared.wake[to].notify_all()
            for tensor, source in receives:
                mailbox = self.shared.mailboxes[source, self.rank]
                receiving.append(Expected(tensor, source, mailbox.expected))
                mailbox.expected += 1
        self.expected += receiving
        return ThreadsPending(self, sending, receiving)

    def take_what_has_come(self) -> None:
        """Take every message that is there for a receive that was posted, whoever waits for what."""
        for expected in [*self.expected]:
            with self.shared.lock:
                message = self.shared.mailboxes[expected.source, self.rank].messages.pop(expected.number, None)
            if message is not None:
                self._take(expected, message)
                self.expected.remove(expected)

    def _take(self, expected: Expected, message: Message) -> None:
        given, wanted = message.tensor, expected.tensor
        if given.numel() == wanted.numel() and given.dtype == wanted.dtype:
            wanted.copy_(given)
        else:
            expected.problem = (
                f"rank {expected.source} sent {given.dtype}[{given.numel()}] to rank {self.rank}, "
                f"which expected {wanted.dtype}[{wanted.numel()}]"
            )
        expected.done = True
        with self.shared.lock:
            message.done = True
            self.shared.wake[expected.source].notify_all()

    def enter_round(self, number: int) -> None:
        for fault in self.shared.faults:
            if (fault.rank, fault.call, fault.round) == (self.rank, self.call_count, number):
                fault.strike(self)

    def close(self, drain: bool) -> None:
        if not drain:
            self.shared.leave(self.rank)
        super().close(drain)
        self.shared.leave(self.rank)


class ThreadsHealth(Health):
    """Everybody reads and writes the same memory."""

    def __init__(self, shared: ThreadGroup, rank: int) -> None:
        self.shared = shared
        self.rank = rank

    def publish(self, progress: RankProgress) -> None:
        self.shared.progress[self.rank] = progress

    def progress_of(self, rank: int) -> RankProgress:
        return self.shared.progress[check_rank(rank, self.shared.world)]

    def abort(self, why: str) -> None:
        self.shared.abort(self.rank, why)


class ThreadsPending:
    """Messages between threads under way."""

    def __init__(
        self, transport: ThreadsTransport, sending: list[tuple[Message, int]], receiving: list[Expected]
    ) -> None:
        self.transport = transport
        self.sending = sending
        self.receiving = receiving

    def wait(self, deadline_s: float | None = None) -> None:
        """See that all has arrived, then that all that was sent has been taken."""
        self.transport.birthplace.require()
        until = time.monotonic() + (deadline_s or self.transport.deadlines.operation)
        for expected in self.receiving:
            self._wait(expected, expected.source, until)
            if expected.problem:
                raise Desync(expected.problem)
        for message, to in self.sending:
            self._wait(message, to, until)

    def _wait(self, one: Message | Expected, peer: int, until: float) -> None:
        """Wait for a peer, and meanwhile take what comes from any."""
        group = self.transport.shared
        while True:
            self.transport.take_what_has_come()
            with group.lock:
                if one.done:
                    return
                if not any(
                    e.number in group.mailboxes[e.source, self.transport.rank].messages for e in self.transport.expected
                ):
                    self._sleep(peer, until)

    def _sleep(self, peer: int, until: float) -> None:
        """Sleep until something changes; raise where it never will. The lock is held.

        A failure of the group concerns those who wait for a rank that has failed with it. A call that all ranks have
        begun before comes to its end, though one of them may be slow to wake up.
        """
        transport, group = self.transport, self.transport.shared
        left = until - time.monotonic()
        if transport.rank in group.gone:
            raise FabricClosed("the fabric was closed while a call was under way")
        if peer not in group.gone and peer not in group.failed and left > 0:
            group.waits_for[transport.rank] = peer
            group.wake[transport.rank].wait(left)
            if group.failure is None and time.monotonic() < until:
                group.waits_for.pop(transport.rank, None)
            return
        error = group.fail(transport.rank, peer, transport.during, transport.deadlines.operation - left)
        transport.health.failure = error
        raise error
