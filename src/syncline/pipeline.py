"""The path of a bucket: from its last gradient to the mean over ranks. Every seam leaves a span.

Without a codec a bucket is one asynchronous all-reduce. With one, a thread carries the codec's conversations through,
bucket by bucket; what they come to is written when all ranks are known to have gone through with the pass (`settle`),
so that what was kept from earlier steps is as it was if they have not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import torch

from syncline.buckets.bucket import Bucket
from syncline.codecs.answers import converse
from syncline.codecs.codec import Codec, Part, Place, State
from syncline.codecs.conversation import Decoder
from syncline.codecs.feedback import Feedback, Units
from syncline.codecs.none import NoCodec
from syncline.fabric.base import Fabric, Handle, Times
from syncline.fabric.worker import Worker
from syncline.guards.finite import is_finite
from syncline.tracing.quality import Quality, Watch
from syncline.tracing.spans import BucketSpan, Recorder


@dataclass(frozen=True)
class Flight:
    """A bucket on its way."""

    number: int
    bucket: Bucket
    handle: Handle
    ready_ns: int


class Pipeline:
    """Starts buckets in order and waits for them."""

    def __init__(self, fabric: Fabric, collective: str, recorder: Recorder) -> None:
        self.fabric = fabric
        self.collective = collective
        self.recorder = recorder

    def start(self, step: int, bucket: Bucket) -> Flight:
        """Send a bucket off. Its memory belongs to the fabric until it is waited for."""
        ready_ns = monotonic_ns()
        handle = self.fabric.all_reduce_async(bucket.flat, op="mean", collective=self.collective)
        return Flight(bucket.number, bucket, handle, ready_ns)

    def wait(self, flight: Flight) -> None:
        """Until all that ranks have to say about the bucket is said."""
        waited_from_ns = monotonic_ns()
        flight.handle.wait()
        waited_to_ns = monotonic_ns()
        times = flight.handle.times()
        sent = self.sent_bytes(flight.bucket)
        self.recorder.buckets.append(
            BucketSpan(flight.number, flight.bucket.nbytes, sent, flight.ready_ns, *times, waited_from_ns, waited_to_ns)
        )

    def sent_bytes(self, bucket: Bucket) -> int:
        """What was said instead of the gradients."""
        return bucket.nbytes

    def settle(self, bucket: Bucket, is_good: bool) -> None:
        """Write the mean, if the pass is good."""

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What is kept from step to step, by parameter."""
        return {}

    def load_state_dict(self, saved: dict[str, dict[str, Any]]) -> None:
        """Go on from there."""

    def close(self) -> None:
        """Let threads end."""


@dataclass
class Coded:
    """What a codec keeps of one bucket."""

    parts: tuple[Part, ...]
    state: State
    feedback: Feedback | None
    staged: State
    work: torch.Tensor  # the values in float32, which are the bucket's own where they are of float32
    decoder: Decoder | None = None
    said: int = 0
    sampled: tuple[int, float] | None = None  # the step, and the norm of what was to be sent


class CodecPipeline(Pipeline):
    """Sends what a codec makes of a bucket."""

    def __init__(
        self, fabric: Fabric, collective: str, recorder: Recorder, codec: Codec, seed: int, units: Callable[[], Units]
    ) -> None:
        super().__init__(fabric, collective, recorder)
        self.codec = codec
        self.seed = seed
        self.units = units
        self.worker = Worker(f"rank {fabric.rank} encodes")
        self.coded: dict[int, Coded] = {}
        self.saved: dict[str, dict[str, Any]] = {}
        self.watch = Watch()
        fabric.at_close.append(self.close)

    def start(self, step: int, bucket: Bucket) -> Flight:
        ready_ns = monotonic_ns()

        def work() -> Times:
            began_ns = monotonic_ns()
            self.encode(step, bucket)
            return Times(began_ns, began_ns, monotonic_ns())

        handle = self.worker.submit(work, f"bucket {bucket.number}", self.fabric.deadlines.operation)
        return Flight(bucket.number, bucket, handle, ready_ns)

    def encode(self, step: int, bucket: Bucket) -> None:
        """Everything ranks say about a bucket. One that is not finite here is said to be, and goes as zeros."""
        coded = self.coded_of(bucket)
        coded.work.copy_(bucket.values)
        if not is_finite(coded.work):
            bucket.bad.fill_(1)
            coded.work.zero_()
        elif coded.feedback is not None:
            coded.feedback.add_to(coded.work)
        if coded.feedback is not None and self.watch.is_due(step):
            coded.sampled = (step, float(coded.work.norm()))
        coded.staged = dict(coded.state)
        place = Place(self.fabric.rank, self.fabric.world, step, self.seed, coded.parts)
        conversation = self.codec.reduce(coded.work, coded.staged, place)
        coded.decoder, coded.said = converse(conversation, self.fabric, self.collective)
        self.fabric.all_reduce(bucket.tail, op="mean")

    def coded_of(self, bucket: Bucket) -> Coded:
        """Made when a bucket leaves for the first time."""
        if bucket.number not in self.coded:
            parts = parts_of(bucket)
            device = bucket.values.device
            feedback = Feedback(parts, self.units, device) if self.codec.feedback else None
            plain = bucket.values.dtype == torch.float32
            work = bucket.values if plain else torch.zeros_like(bucket.values, dtype=torch.float32)
            made = Coded(parts, self.codec.start(parts, device), feedback, {}, work)
            restore(made, self.saved)
            self.coded[bucket.number] = made
        return self.coded[bucket.number]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        kept: dict[str, Any] = {}
        worth: dict[str, Any] = {}
        state: dict[str, Any] = {}
        for coded in self.coded.values():
            state |= {key: value.clone() for key, value in coded.state.items()}
            if coded.feedback is not None:
                worth |= coded.feedback.worth
                kept |= {part.name: coded.feedback.kept[part.lo : part.hi].clone() for part in coded.parts}
        return {"kept": kept, "worth": worth, "state": state}

    def load_state_dict(self, saved: dict[str, dict[str, Any]]) -> None:
        self.saved = saved
        for coded in self.coded.values():
            restore(coded, saved)

    def sent_bytes(self, bucket: Bucket) -> int:
        return self.coded[bucket.number].said

    def settle(self, bucket: Bucket, is_good: bool) -> None:
        coded = self.coded[bucket.number]
        if is_good and coded.decoder is not None:
            coded.state = coded.staged
            self.take_sample(bucket.number, coded)
            if coded.feedback is not None:
                coded.feedback.commit(coded.work)
            coded.decoder(coded.work)
            if coded.work is not bucket.values:
                bucket.values.copy_(coded.work)
        coded.decoder = None
        coded.sampled = None

    def take_sample(self, number: int, coded: Coded) -> None:
        """How much of a bucket was not sent, in the steps in which that is looked at."""
        if coded.sampled is not None:
            step, wanted = coded.sampled
            left = float(coded.work.norm())
            self.watch.add(Quality(step, number, left / max(wanted, 1e-30), left))

    def close(self) -> None:
        self.worker.close(drain=False)


def restore(coded: Coded, saved: dict[str, dict[str, Any]]) -> None:
    """Put back what was saved of the parameters of a bucket."""
    for key in coded.state:
        if key in saved.get("state", {}):
            coded.state[key] = saved["state"][key].clone()
    if coded.feedback is None:
        return
    for part in coded.parts:
        if part.name in saved.get("kept", {}):
            coded.feedback.kept[part.lo : part.hi] = saved["kept"][part.name].flatten()
            coded.feedback.worth[part.name] = saved["worth"][part.name]


def parts_of(bucket: Bucket) -> tuple[Part, ...]:
    """The parameters of a bucket by name and place."""
    parts, start = [], 0
    for slot in bucket.slots:
        numel = slot.parameter.numel()
        parts.append(Part(slot.name, start, start + numel, slot.parameter.shape))
        start += numel
    return tuple(parts)


def make_pipeline(
    fabric: Fabric, collective: str, recorder: Recorder, codec: Codec, seed: int, units: Callable[[], Units]
) -> Pipeline:
    """The shortest path that does what was asked for."""
    if isinstance(codec, NoCodec):
        return Pipeline(fabric, collective, recorder)
    return CodecPipeline(fabric, collective, recorder, codec, seed, units)
