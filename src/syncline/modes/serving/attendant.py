"""The thread at a server that attends to one worker: it waits for messages, lets the server act, and answers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from syncline.codecs.codec import Codec
from syncline.codecs.none import NoCodec
from syncline.core.message import read_message, write_message
from syncline.core.parts import parts_of
from syncline.errors import CorruptMessage, FabricClosed, FabricError
from syncline.modes.replica import Replica
from syncline.modes.serving.coders import Coder, Mirror, seed_of
from syncline.modes.serving.link import Kind, Link, Message
from syncline.modes.serving.server import Gradients, Server
from syncline.path.bucket import Slot, view_of
from syncline.replicas import pack

log = logging.getLogger(__name__)
IS_GOOD, IS_MAPPED = 1, 2  # flags of a commit
IS_DIFFERENT = 1  # flag of an answer to a replacement worker
WAIT_S = 0.5  # between saying to wait: how much later than at the deadline a worker notices another server's end
AWAY_S = 30 * 24 * 3600.0  # a worker that has left need not say anything


class Attendant:
    """Serves one worker."""

    def __init__(
        self,
        server: Server,
        buckets: Mapping[int, Sequence[Slot]],
        worker: int,
        link: Link,
        push: Codec,
        pull: Codec,
        seed: int,
        replica: Replica,
    ) -> None:
        self.server = server
        self.replica = replica
        self.buckets = buckets
        self.worker = worker
        self.link = link
        self.push = push
        self.pull = pull
        self.seed = seed
        self.ears: dict[int, Coder] = {}
        self.mirrors: dict[int, Mirror] = {}
        self.told = 0  # times that parameters were sent
        self.closing = False
        self.thread = threading.Thread(target=self.attend, name=f"rank {server.rank} serves rank {worker}", daemon=True)
        self.thread.start()

    def attend(self) -> None:
        """Until the worker is gone."""
        acts: dict[Kind, Callable[[Message], None]] = {
            Kind.INTRODUCE: self.introduce,
            Kind.ENTER: self.enter,
            Kind.PUSH: self.stage,
            Kind.COMMIT: self.commit,
            Kind.PULL: self.pull_only,
            Kind.MEET: self.meet,
            Kind.SAVE: self.save,
            Kind.LOAD: self.load,
            Kind.LEAVE: self.leave,
        }
        try:
            while True:
                message = self.link.receive(None if self.worker in self.server.workers else AWAY_S)
                if message.kind not in acts:
                    raise CorruptMessage(f"rank {self.worker} said {message.kind.name} where nothing was asked")
                acts[message.kind](message)
        except FabricError as error:
            log.info("rank %d serves rank %d no longer: %s", self.server.rank, self.worker, error)
        except Exception:
            log.exception("rank %d cannot serve rank %d", self.server.rank, self.worker)
        finally:
            self.server.leave(self.worker)
            self.link.close()  # a worker that waits for an answer is told

    def introduce(self, message: Message) -> None:
        """A replacement worker takes from this rank what is in no bucket, if it has the same model and settings."""
        mine = self.replica.layout()
        if read_message(message.body) == mine:
            self.link.send(Message(Kind.ANSWER, payload=pack(self.replica.unserved()).cpu()))
        else:
            self.link.send(Message(Kind.ANSWER, flag=IS_DIFFERENT, body=write_message(mine)))

    def enter(self, message: Message) -> None:
        """Say where parameters are, and agree on the state of codecs."""
        states = read_message(message.body)
        self.mirrors.clear()
        self.ears = {number: self.coder(number, self.push, "push") for number in self.buckets}
        for number, state in states.items():
            if number in self.ears:
                self.ears[number].state = state
        clock = self.server.enter(self.worker)
        where = {number: shelf.descriptor for number, shelf in self.server.shelves.items()}
        self.link.send(Message(Kind.ANSWER, step=clock, body=write_message((os.getpid(), where))))

    def coder(self, number: int, codec: Codec, what: str) -> Coder:
        """Of one bucket."""
        return Coder.begin(codec, parts_of(self.buckets[number]), seed_of(self.seed, self.worker, what))

    def stage(self, message: Message) -> None:
        """Gradients of a bucket: those of all its parameters, and which of them the worker has."""
        if message.number not in self.buckets:
            raise CorruptMessage(f"rank {self.worker} pushed bucket {message.number}, which is not served here")
        self.server.stage(self.worker, message.number, partial(self.decode, message))

    def decode(self, message: Message) -> Gradients:
        """Gradients by parameter, with its shape and strides."""
        slots = self.buckets[message.number]
        count = len(slots)
        numel = sum(slot.parameter.numel() for slot in slots)
        is_coded = not len(message.payload)
        if len(message.body) < count or (not is_coded and len(message.payload) < numel):
            raise CorruptMessage(f"rank {self.worker} pushed too little for {numel} gradients of {count} parameters")
        unused = {slot.name for slot, is_used in zip(slots, message.body[:count].tolist(), strict=True) if not is_used}
        values = self.hear(message, count, unused) if is_coded else message.payload[:numel]
        return {
            part.name: view_of(slot, values[part.lo : part.hi].to(slot.parameter.dtype))
            for part, slot in zip(parts_of(slots), slots, strict=True)
            if part.name not in unused
        }

    def hear(self, message: Message, count: int, unused: set[str]) -> Tensor:
        """What the worker meant by the words behind so many flags."""
        return self.ears[message.number].hear(message.body[count:], message.step, torch.device("cpu"), unused)

    def commit(self, message: Message) -> None:
        """Apply what was staged, let the worker wait for its turn, and give it the parameters."""
        before = {number: ear.state for number, ear in self.ears.items()}
        staleness = self.server.commit(
            self.worker, message.step, bool(message.flag & IS_GOOD), read_message(message.body)
        )
        self.wait(lambda: self.server.clock.may_go_on(self.worker))
        if not self.server.applied:  # then the worker keeps its state too
            for number, state in before.items():
                self.ears[number].state = state
        self.give(message, self.server.applied, staleness)

    def pull_only(self, message: Message) -> None:
        """Give the parameters when the worker may go on."""
        self.server.catch_up(self.worker, message.step)
        self.wait(lambda: self.server.clock.may_go_on(self.worker))
        self.give(message, message.step)

    def meet(self, message: Message) -> None:
        """Give the parameters when all workers are here, to the last bit."""
        number = self.server.meet(self.worker, message.step)
        self.wait(lambda: self.server.meetings >= number)
        self.give(message, self.server.clock.steps.get(self.worker, message.step), exactly=True)

    def wait(self, until: Callable[[], bool]) -> None:
        """For other workers. Those that are silent for too long are dropped; until then this one is told to wait."""
        while not self.server.wait(lambda: self.closing or until(), min(WAIT_S, self.server.deadline_s / 4)):
            self.link.send(Message(Kind.WAIT))
        if self.closing:
            raise FabricClosed(f"rank {self.worker} is served no longer")

    def give(self, asked: Message, step: int, staleness: int = 0, exactly: bool = False) -> None:
        """Give the parameters, as a worker can take them."""
        if asked.flag & IS_MAPPED:
            self.link.send(Message(Kind.ANSWER, step=step, flag=staleness))
            self.lend()
            return
        with self.server.changed:
            version = self.server.read(self.worker)
            copies = {number: shelf.flat.clone() for number, shelf in self.server.shelves.items()}
        self.told += 1
        self.link.send(Message(Kind.ANSWER, version, step, staleness))
        for number, flat in copies.items():
            self.link.send(self.told_of(number, flat, exactly))

    def lend(self) -> None:
        """Let the worker read the parameters where they are, again if it was too slow."""
        is_late = True
        while is_late:
            self.expect(Kind.READ)
            version, until_ns = self.server.lend(self.worker)
            self.link.send(Message(Kind.ANSWER, version, flag=until_ns))
            is_late = bool(self.expect(Kind.TAKEN).flag)
            self.server.give_back(self.worker)

    def expect(self, kind: Kind) -> Message:
        """The worker has one thing to say here."""
        message = self.link.receive()
        if message.kind != kind:
            raise CorruptMessage(f"rank {self.worker} said {message.kind.name} where {kind.name} was due")
        return message

    def told_of(self, number: int, flat: Tensor, exactly: bool) -> Message:
        """One bucket, as it is or as what has changed."""
        if isinstance(self.pull, NoCodec):
            return Message(Kind.PARAMETERS, number, payload=flat)
        if exactly or number not in self.mirrors:
            self.mirrors[number] = Mirror(self.coder(number, self.pull, "pull"), flat)
            return Message(Kind.PARAMETERS, number, payload=flat)
        return Message(Kind.PARAMETERS, number, self.told, body=self.mirrors[number].changes(flat, self.told))

    def save(self, message: Message) -> None:
        """What a checkpoint needs, as it was when all workers met."""
        self.link.send(Message(Kind.ANSWER, body=write_message(self.server.snapshot)))

    def load(self, message: Message) -> None:
        """Go on from a checkpoint."""
        self.server.load_state_dict(read_message(message.body))
        self.link.send(Message(Kind.ANSWER))

    def leave(self, message: Message) -> None:
        """The worker is done, for now."""
        self.link.send(Message(Kind.ANSWER))  # before a server that nobody needs any more may end
        self.server.leave(self.worker, comes_back=bool(message.flag))

    def close(self) -> None:
        """End the thread."""
        self.closing = True
        self.server.wake()
        self.link.close()
        self.thread.join()
