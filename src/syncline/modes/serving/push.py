"""The path of a bucket to its server: it is staged there while backward goes on, and counts when it is committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns

import torch
from torch import Tensor

from syncline.buckets.bucket import Bucket, Side, Slot
from syncline.codecs.codec import State
from syncline.codecs.feedback import Units
from syncline.codecs.memory import Coded, Memory, Saved
from syncline.codecs.none import NoCodec
from syncline.errors import ConfigError
from syncline.fabric.base import Handle, Times
from syncline.fabric.worker import Worker
from syncline.guards.finite import has_room, is_finite
from syncline.modes.replica import Replica
from syncline.modes.serving.coders import Coder, seed_of
from syncline.modes.serving.link import Kind, Link, Message, naming_server
from syncline.pipeline import Flight, Pipeline, note_applied, parts_of, to_be_kept, unused_in


@dataclass
class Pushed:
    """What was made of a bucket, until it is committed."""

    coded: Coded
    left: Tensor  # what was not sent
    state: State
    units: Units
    unused: set[str]  # parameters that this worker had no gradient of, which its server leaves where they are


class NotYet:
    """A push that will be made later."""

    def wait(self, deadline_s: float | None = None) -> None:
        """Nothing is under way."""

    def done(self) -> bool:
        """Nothing is."""
        return True

    def times(self) -> Times:
        """No time at all."""
        now = monotonic_ns()
        return Times(now, now, now)

    def finite(self) -> bool | None:
        """Nobody has looked."""
        return None


class PushPipeline(Pipeline):
    """Sends buckets to their servers, one after the other, in a thread that is the only one to use the links."""

    waits_for_ranks = False

    def __init__(self, replica: Replica, links: dict[int, Link], server_of: dict[int, int]) -> None:
        super().__init__(replica.fabric, "auto", replica.recorder)
        self.replica = replica
        self.links = links
        self.server_of = server_of  # by bucket
        self.codec = replica.settings.codec
        self.seed = replica.settings.seed
        self.sends_anything = isinstance(self.codec, NoCodec) and replica.settings.nonfinite == "ignore"
        self.worker = Worker(f"rank {self.fabric.rank} talks to servers")
        self.memory = Memory(self.codec)
        self.pushed: dict[int, Pushed] = {}
        self.said: dict[int, int] = {}
        self.staged: list[Flight] = []  # since the last commit
        self.holds = False  # nothing is pushed before the step, because gradients change after backward

    def units(self) -> Units:
        """What gradients are worth when they are committed: they have been unscaled by then."""
        return Units(self.replica.learning_rates())

    def submit(self, work: Callable[[], None], what: str) -> Handle:
        """Do something in turn, in the thread that talks to servers."""

        def timed() -> Times:
            began_ns = monotonic_ns()
            work()
            return Times(began_ns, began_ns, monotonic_ns())

        return self.worker.submit(timed, what, self.fabric.deadlines.operation)

    def start(self, step: int, bucket: Bucket, has_data: bool = True) -> Flight:
        if bucket.number not in self.server_of:
            names = ", ".join(slot.name for slot in bucket.slots[:3])
            raise ConfigError(f"{names} began to need gradients after servers were set up; unfreeze it before Sync")
        side, ready_ns, units = bucket.side, monotonic_ns(), self.units()
        self.said[bucket.number] = 0
        if self.holds:
            return Flight(bucket, side, NotYet(), ready_ns, said=lambda: 0)
        handle = self.submit(lambda: self.push(step, bucket, side, units), f"bucket {bucket.number}")
        return Flight(bucket, side, handle, ready_ns, said=lambda: self.said[bucket.number])

    def push(self, step: int, bucket: Bucket, side: Side, units: Units) -> None:
        """Stage a bucket at its server; one that cannot be sent is only marked."""
        self.said[bucket.number] = 0
        message = self.message_of(step, bucket, side, units)
        if message is None:
            side.bad.fill_(1)
            return
        self.said[bucket.number] = message.body.nbytes + message.payload.nbytes
        link = self.links[self.server_of[bucket.number]]
        with naming_server(link):
            link.send(message)

    def message_of(self, step: int, bucket: Bucket, side: Side, units: Units) -> Message | None:
        """With the gradients or what a codec makes of them; None if they are not finite, or too large for it."""
        if isinstance(self.codec, NoCodec):
            is_sent = self.sends_anything or is_finite(side.values)
            return Message(Kind.PUSH, bucket.number, step, payload=side.flat) if is_sent else None
        words = self.encode(step, bucket, side, units)
        if words is None:
            return None
        return Message(Kind.PUSH, bucket.number, step, body=torch.cat([side.flags.cpu().to(torch.int64), words]))

    def encode(self, step: int, bucket: Bucket, side: Side, units: Units) -> Tensor | None:
        """What a codec makes of a copy of the gradients."""
        work = side.values.to("cpu", torch.float32, copy=True)
        coded = self.coded_of(bucket.number, bucket.slots)
        coder = Coder(self.codec, coded, seed_of(self.seed, self.fabric.rank, "push"))
        own = coded.correct(work, coder.place(step))
        if coded.feedback is not None:
            coded.feedback.add_to(work, units)
        if not has_room(work, 1):
            return None
        words, _, state = coder.say(work, step, own)
        self.pushed[bucket.number] = Pushed(coded, work, state, units, unused_in(bucket.slots, side.flags))
        is_kept = all(has_room(tensor, 1) for tensor in to_be_kept(coded, work, state))
        return words if is_kept else None

    def coded_of(self, number: int, slots: Sequence[Slot]) -> Coded:
        """What is kept of a bucket."""
        return self.memory.of(number, lambda: parts_of(slots), torch.device("cpu"))

    def handed_out(self, flights: Sequence[Flight]) -> None:
        self.staged += flights  # servers use them, when they are committed

    def settle(self, applied: set[int]) -> None:
        """These servers have applied the step; elsewhere it is to be forgotten."""
        staged, self.staged = self.staged, []
        note_applied([flight for flight in staged if self.server_of[flight.number] in applied])
        pushed, self.pushed = self.pushed, {}
        for number, one in pushed.items():
            if self.server_of[number] in applied:
                one.coded.commit(one.left, one.state, one.units, one.unused)

    def state_dict(self) -> Saved:
        return self.memory.state_dict()

    def load_state_dict(self, saved: Saved) -> None:
        self.memory.load_state_dict(saved)

    def states_of(self, buckets: Mapping[int, Sequence[Slot]]) -> dict[int, State]:
        """Of the codecs of all buckets, which servers are told."""
        if isinstance(self.codec, NoCodec):
            return {}
        return {number: self.coded_of(number, slots).state for number, slots in buckets.items()}

    def close(self) -> None:
        self.worker.close(drain=False)
