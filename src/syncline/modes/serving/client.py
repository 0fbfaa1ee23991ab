"""A worker's side of its servers: commits steps, takes parameters, meets the other workers, leaves and comes again.

Everything here happens in the one thread that talks to servers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Any

import torch
from torch import Tensor

from syncline.codecs.codec import Codec, State
from syncline.core.message import read_message, write_message
from syncline.core.parts import parts_of
from syncline.modes.serving.attendant import IS_DIFFERENT, IS_GOOD, IS_MAPPED
from syncline.modes.serving.coders import Coder, seed_of
from syncline.modes.serving.link import Kind, Link, Message, naming_server
from syncline.modes.serving.shelf import map_of_another
from syncline.path.bucket import Slot, view_of
from syncline.replicas import layout_mismatch, unpack

Buckets = Mapping[int, Sequence[Slot]]


class Client:
    """Talks to one server."""

    def __init__(self, link: Link, buckets: Buckets, pull: Codec, seed: int, worker: int, same_machine: bool) -> None:
        self.link = link
        self.buckets = buckets  # that the server has
        self.pull = pull
        self.seed = seed_of(seed, worker, "pull")
        self.worker = worker
        self.same_machine = same_machine
        self.maps: dict[int, Tensor] = {}
        self.ears: dict[int, Coder] = {}
        self.flats: dict[int, Tensor] = {}  # what this worker has, where it is told of changes only
        self.version = 0
        self.staleness: deque[int] = deque(maxlen=100_000)

    @property
    def is_mapped(self) -> bool:
        """Whether parameters can be read where the server has them."""
        return len(self.maps) == len(self.buckets)

    def enter(self, states: Mapping[int, State]) -> int:
        """Come, with the states of the codecs of pushes; returns the clock to go on from."""
        with naming_server(self.link):
            mine = {number: state for number, state in states.items() if number in self.buckets}
            self.link.send(Message(Kind.ENTER, body=write_message(mine)))
            answer = self.link.receive()
        process, descriptors = read_message(answer.body)
        if self.same_machine and not self.maps:
            self.map_all(process, descriptors)
        return answer.step

    def introduce(self, layout: list[str], unserved: Sequence[Tensor]) -> None:
        """First words of a replacement worker: take what is in no bucket, if the server's rank has the same model."""
        with naming_server(self.link):
            self.link.send(Message(Kind.INTRODUCE, body=write_message(layout)))
            answer = self.link.receive()
        if answer.flag & IS_DIFFERENT:
            raise layout_mismatch(self.link.peer, read_message(answer.body), self.worker, layout)
        unpack(answer.payload, unserved)

    def map_all(self, process: int, descriptors: Mapping[int, int]) -> None:
        """Map what the server has; if that is not allowed, parameters are sent."""
        for number, slots in self.buckets.items():
            numel = sum(slot.parameter.numel() for slot in slots)
            found = map_of_another(process, descriptors[number], numel, slots[0].parameter.dtype)
            if found is not None:
                self.maps[number] = found

    def commit(self, step: int, good: bool, groups: Tensor) -> None:
        """The gradients of a step are complete."""
        with naming_server(self.link):
            flag = IS_GOOD * good + IS_MAPPED * self.is_mapped
            self.link.send(Message(Kind.COMMIT, step=step, flag=flag, body=groups))

    def ask_to_meet(self, step: int) -> None:
        """Wait for the other workers."""
        with naming_server(self.link):
            self.link.send(Message(Kind.MEET, step=step, flag=IS_MAPPED * self.is_mapped))

    def ask_to_pull(self, step: int) -> None:
        """Parameters without a gradient."""
        with naming_server(self.link):
            self.link.send(Message(Kind.PULL, step=step, flag=IS_MAPPED * self.is_mapped))

    def take(self) -> Message | None:
        """Take the parameters that the server gives, and what it says about them; None if it says to wait."""
        with naming_server(self.link):
            answer = self.link.receive()
            if answer.kind == Kind.WAIT:
                return None
            if self.is_mapped:
                self.read_in_place()
                return answer
            self.version = answer.number
            for _ in self.buckets:
                self.take_bucket(self.link.receive())
        return answer

    def read_in_place(self) -> None:
        """One copy, from the server's memory to the parameters; another one if it took too long."""
        is_late = True
        while is_late:
            self.link.send(Message(Kind.READ))
            lent = self.link.receive()
            self.version = lent.number
            for number, flat in self.maps.items():
                write(self.buckets[number], flat)
            is_late = monotonic_ns() > lent.flag
            self.link.send(Message(Kind.TAKEN, flag=is_late))

    def take_bucket(self, message: Message) -> None:
        """A bucket as it is, or what has changed in it."""
        number, flat = message.number, message.payload
        if not len(flat) and len(message.body):
            changes = self.ears[number].hear(message.body, message.step, torch.device("cpu"))
            flat = self.flats[number].add_(changes)
        elif self.pull.name != "none":
            parts = parts_of(self.buckets[number])
            self.ears[number] = Coder.begin(self.pull, parts, self.seed)
            self.flats[number] = flat.float()
        write(self.buckets[number], flat)

    def save(self) -> dict[str, Any]:
        """What a checkpoint needs of the server, as it was when all workers met last."""
        with naming_server(self.link):
            self.link.send(Message(Kind.SAVE))
            saved: dict[str, Any] = read_message(self.link.receive().body)
        return saved

    def load(self, saved: dict[str, Any]) -> None:
        """Let the server go on from a checkpoint."""
        with naming_server(self.link):
            self.link.send(Message(Kind.LOAD, body=write_message(saved)))
            self.link.receive()

    def leave(self, comes_back: bool) -> None:
        """Say goodbye."""
        with naming_server(self.link):
            self.link.send(Message(Kind.LEAVE, flag=comes_back))
            self.link.receive()


@torch.no_grad()
def write(slots: Sequence[Slot], flat: Tensor) -> None:
    """Give parameters the values of a bucket."""
    start = 0
    for slot in slots:
        numel = slot.parameter.numel()
        slot.parameter.copy_(view_of(slot, flat[start : start + numel]))
        start += numel
