"""The path of a bucket to its server: it is staged there while backward goes on, and counts when it is committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns

import torch
from torch import Tensor

from syncline.codecs.codec import State
from syncline.codecs.none import NoCodec
from syncline.core.parts import NamedParameter, parts_of
from syncline.core.status import OwnStatus, PassStatus, read_status, write_status
from syncline.errors import ConfigError
from syncline.fabric.call_thread import CallThread
from syncline.fabric.handle import Handle, Times
from syncline.guards.finite import is_finite, magnitude_fits
from syncline.modes.replica import Replica
from syncline.modes.serving.coders import Coder, seed_of
from syncline.modes.serving.link import Kind, Link, Message, naming_server
from syncline.path.bucket import Slot
from syncline.path.codec_state import BucketCodecState, CodecStateStore, PendingEncoding, Saved
from syncline.path.path import Path
from syncline.path.residuals import GradientScale
from syncline.path.work import BucketWork, GradientBucket, Memory, PassWork


@dataclass
class Pushed:
    """What was made of a bucket, until it is committed."""

    coded: BucketCodecState
    pending: PendingEncoding
    unused: set[str]  # parameters that this worker had no gradient of, which its server leaves where they are


@dataclass(eq=False)
class PushedPass(PassWork):
    """Buckets on their way to servers."""

    handles: list[Handle | None] = field(default_factory=list)  # None: pushed later, because gradients change yet
    nonfinite: set[int] = field(default_factory=set)  # numbers of buckets that were not sent


class PushPath(Path):
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
        self.thread = CallThread(f"rank {self.fabric.rank} talks to servers")
        self.store = CodecStateStore(self.codec)
        self.pushed: dict[int, Pushed] = {}
        self.staged: list[BucketWork] = []  # since the last commit
        self.holds = False  # nothing is pushed before the step, because gradients change after backward

    def scale(self) -> GradientScale:
        """What gradients are worth when they are committed: they have been unscaled by then."""
        return GradientScale(self.replica.learning_rates())

    def submit(self, work: Callable[[], None], what: str) -> Handle:
        """Do something in turn, in the thread that talks to servers."""

        def timed() -> Times:
            began_ns = monotonic_ns()
            work()
            return Times(began_ns, began_ns, monotonic_ns())

        return self.thread.submit(timed, what, self.fabric.deadlines.operation)

    def begin(self, number: int, has_data: bool = True) -> PushedPass:
        return PushedPass(number, has_data)

    def start(self, current: PassWork, bucket: GradientBucket) -> None:
        assert isinstance(current, PushedPass)
        if bucket.number not in self.server_of:
            names = ", ".join(slot.name for slot in bucket.slots[:3])
            raise ConfigError(f"{names} began to need gradients after servers were set up; unfreeze it before Sync")
        work = BucketWork(bucket, bucket.buffer)
        scale, present = self.scale(), list(bucket.present)
        handle = None
        if not self.holds:
            handle = self.submit(lambda: self.push(current, work, present, scale), f"bucket {bucket.number}")
        current.works.append(work)
        current.handles.append(handle)

    def end(self, current: PassWork, own: OwnStatus) -> None:
        current.own = own

    def wait_for_status(self, current: PassWork) -> PassStatus:
        return self.wait(current)

    def wait(self, current: PassWork) -> PassStatus:
        """Wait until all buckets are staged. A worker steps by itself, so its own status is all there is."""
        assert isinstance(current, PushedPass)
        if current.status is not None:
            return current.status
        for work, handle in zip(current.works, current.handles, strict=True):
            from_ns = monotonic_ns()
            if handle is not None:
                handle.wait()
            to_ns = monotonic_ns()
            self.note_span(work, handle.times() if handle is not None else Times(to_ns, to_ns, to_ns), from_ns, to_ns)
        own = current.own or OwnStatus(current.number, 1)
        own.nonfinite |= current.nonfinite
        words = write_status(own, current.bucket_numbers, self.fabric.rank, self.fabric.world)
        current.status = read_status(words, current.bucket_numbers, self.fabric.world)
        current.is_complete = True
        return current.status

    # In the thread that talks to servers

    def push(self, current: PushedPass, work: BucketWork, present: list[int], scale: GradientScale) -> None:
        """Stage a bucket at its server; one that cannot be sent is only marked."""
        message = self.message_of(work.bucket, work.buffer, present, scale)
        if message is None:
            current.nonfinite.add(work.number)
            return
        work.sent_bytes = message.body.nbytes + message.payload.nbytes
        link = self.links[self.server_of[work.number]]
        with naming_server(link):
            link.send(message)

    def message_of(
        self, bucket: GradientBucket, buffer: Memory, present: list[int], scale: GradientScale
    ) -> Message | None:
        """With the gradients or what a codec makes of them; None if they are not finite, or too large for it."""
        flags, step = torch.tensor(present), self.good_passes + 1
        if isinstance(self.codec, NoCodec):
            is_sent = self.sends_anything or is_finite(buffer.values)
            return Message(Kind.PUSH, bucket.number, step, body=flags, payload=buffer.values) if is_sent else None
        words = self.encode(step, bucket, buffer, present, scale)
        return Message(Kind.PUSH, bucket.number, step, body=torch.cat([flags, words])) if words is not None else None

    def encode(
        self, step: int, bucket: GradientBucket, buffer: Memory, present: list[int], scale: GradientScale
    ) -> Tensor | None:
        """What a codec makes of a copy of the gradients."""
        coded = self.state_of(bucket.number, bucket.slots)
        coder = Coder(self.codec, coded, seed_of(self.seed, self.fabric.rank, "push"))
        pending = coded.prepare(buffer.values.to("cpu", torch.float32, copy=True), scale, coder.context(step))
        if not magnitude_fits(pending.largest, len(pending.values)):
            return None
        words, _, pending.state = coder.say(pending.values, step, pending.state)
        pending.end()
        unused = {slot.name for slot, is_present in zip(bucket.slots, present, strict=True) if not is_present}
        self.pushed[bucket.number] = Pushed(coded, pending, unused)
        return words if coded.fits(pending, 1) else None

    def state_of(self, number: int, slots: Sequence[NamedParameter]) -> BucketCodecState:
        """Codec state and residual of a bucket."""
        return self.store.of(number, lambda: parts_of(slots), torch.device("cpu"))

    def grads_assigned(self, current: PassWork) -> None:
        self.staged += current.works  # servers use them, when they are committed

    def commit(self, applied: set[int]) -> None:
        """These servers have applied the step; elsewhere it is to be forgotten."""
        staged, self.staged = self.staged, []
        now_ns = monotonic_ns()
        for work in staged:
            if self.server_of[work.number] in applied and work.span is not None:
                work.span.applied_ns = now_ns
        pushed, self.pushed = self.pushed, {}
        for number, one in pushed.items():
            if self.server_of[number] in applied:
                one.coded.commit(one.pending, one.unused)
        self.good_passes += bool(applied)

    def state_dict(self) -> Saved:
        return self.store.state_dict()

    def load_state_dict(self, saved: Saved) -> None:
        self.store.load_state_dict(saved)

    def states_of(self, buckets: Mapping[int, Sequence[Slot]]) -> dict[int, State]:
        """Codec states of all buckets, which servers are told."""
        if isinstance(self.codec, NoCodec):
            return {}
        return {number: self.state_of(number, slots).state for number, slots in buckets.items()}

    def close(self) -> None:
        self.thread.close(drain=False)
