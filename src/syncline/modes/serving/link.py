"""Messages between a worker and a server: a head of eight words, and what it announces.

Each pair has a fabric of its own, so that a worker that dies breaks nothing but its own link. A worker whose server is
in the same process has a link of two queues.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from syncline.errors import CorruptMessage, PeerAborted, PeerError, PeerStalled
from syncline.fabric.base import Fabric
from syncline.modes.serving.speech import DTYPES

HEAD_WORDS = 8
NOTHING = torch.zeros(0, dtype=torch.int64)


class Kind(IntEnum):
    """What a message is about."""

    ENTER = 1  # this worker comes, or comes again; answered with where parameters are
    PUSH = 2  # gradients of one bucket; not answered
    COMMIT = 3  # the step's gradients are complete, or to be forgotten; answered with parameters
    MEET = 4  # wait for all workers; answered with parameters when all are there
    SAVE = 5  # answered with all that a checkpoint of this server needs
    LOAD = 6  # go on from a checkpoint; answered
    LEAVE = 7  # this worker is done; answered
    ANSWER = 8
    PARAMETERS = 9  # of one bucket
    READ = 10  # let nobody change the parameters while this worker reads them; answered with until when
    TAKEN = 11  # it has read them, or was too late and reads again
    PULL = 12  # parameters without a gradient, for a worker that has come; answered with them
    WAIT = 13  # the answer takes long, because others are slow
    INTRODUCE = 14  # a replacement worker says what it has; answered with what the server's rank has beside its buckets


class Message(NamedTuple):
    """One message."""

    kind: Kind
    number: int = 0  # of a bucket
    step: int = 0
    flag: int = 0
    body: Tensor = NOTHING  # words
    payload: Tensor = NOTHING  # any flat tensor


class Link(Protocol):
    """One end of a pair. Only one thread uses it at a time."""

    peer: int  # in the world

    def send(self, message: Message, deadline_s: float | None = None) -> None:
        """Send, and see that it has been taken; the deadline is that of the fabric unless given."""

    def receive(self, deadline_s: float | None = None) -> Message:
        """Wait for the next message."""

    def close(self) -> None:
        """Break it."""


class FabricLink:
    """Through a fabric of two ranks."""

    def __init__(self, fabric: Fabric, peer: int) -> None:
        self.fabric = fabric
        self.peer = peer
        self.other = 1 - fabric.rank

    def send(self, message: Message, deadline_s: float | None = None) -> None:
        kind, number, step, flag, body, payload = message
        code = DTYPES.index(payload.dtype)
        head = torch.tensor([kind, number, step, flag, len(body), code, len(payload), 0])
        sends = [(head, self.other)]
        sends += [(tensor.contiguous(), self.other) for tensor in (body, payload) if len(tensor)]
        self.fabric.transport.post(sends, []).wait(deadline_s)

    def receive(self, deadline_s: float | None = None) -> Message:
        head = torch.zeros(HEAD_WORDS, dtype=torch.int64)
        self.fabric.transport.post([], [(head, self.other)]).wait(deadline_s)
        kind, number, step, flag, words, code, length, _ = head.tolist()
        if kind not in iter(Kind) or min(words, length) < 0 or code not in range(len(DTYPES)):
            raise CorruptMessage(f"{head.tolist()} is no head of a message")
        try:
            body, payload = torch.empty(words, dtype=torch.int64), torch.empty(length, dtype=DTYPES[code])
        except (RuntimeError, TypeError):
            raise CorruptMessage(f"{head.tolist()} announces more than there is memory for") from None
        receives = [(tensor, self.other) for tensor in (body, payload) if len(tensor)]
        if receives:
            self.fabric.transport.post([], receives).wait()
        return Message(Kind(kind), number, step, flag, body, payload)

    def close(self) -> None:
        self.fabric.close(drain=False)


class LocalLink:
    """Inside one process; tensors are passed as they are."""

    def __init__(self, peer: int, inbox: queue.Queue[Message | None], outbox: queue.Queue[Message | None]) -> None:
        self.peer = peer
        self.inbox = inbox
        self.outbox = outbox
        self.deadline_s = 0.0

    @classmethod
    def pair(cls, rank: int, deadline_s: float) -> tuple[LocalLink, LocalLink]:
        """Both ends."""
        there: queue.Queue[Message | None] = queue.Queue()
        back: queue.Queue[Message | None] = queue.Queue()
        ends = cls(rank, there, back), cls(rank, back, there)
        for end in ends:
            end.deadline_s = deadline_s
        return ends

    def send(self, message: Message, deadline_s: float | None = None) -> None:
        self.outbox.put(message)

    def receive(self, deadline_s: float | None = None) -> Message:
        patience_s = deadline_s or self.deadline_s
        try:
            message = self.inbox.get(timeout=patience_s)
        except queue.Empty:
            raise PeerStalled(self.peer, f"rank {self.peer} said nothing for {patience_s} s") from None
        if message is None:
            raise PeerAborted(self.peer, f"rank {self.peer} has closed the link")
        return message

    def close(self) -> None:
        self.outbox.put(None)
        self.inbox.put(None)


@contextmanager
def naming_server(link: Link) -> Iterator[None]:
    """Errors of a pair say who is meant in the world."""
    try:
        yield
    except PeerError as error:
        raise type(error)(
            link.peer,
            f"the server on rank {link.peer} does not answer: it is lost with its parameters, or has given up on this "
            f"worker for being late; resume from the last checkpoint. [{error.message}]",
        ) from None
