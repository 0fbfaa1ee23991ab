"""The path of a bucket: from its last gradient to the mean over ranks. Every seam leaves a span.

Without a codec a bucket is one asynchronous all-reduce. With one, a thread carries the codec's conversations through,
bucket by bucket; what they come to is written when all ranks are known to have gone through with the pass (`finish`),
so that what was kept from earlier steps is as it was if they have not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Literal

import torch
from torch import Tensor

from syncline.buckets.bucket import Bucket, Side, Slot
from syncline.codecs.between_hosts import talk_on
from syncline.codecs.codec import Codec, Part, Place, State
from syncline.codecs.conversation import Decoder
from syncline.codecs.feedback import Units
from syncline.codecs.memory import Coded, Memory, Saved
from syncline.codecs.none import NoCodec
from syncline.codecs.timed import Timed
from syncline.collectives.execute import Op
from syncline.fabric.base import Fabric, Handle, Times
from syncline.fabric.worker import Worker
from syncline.guards.finite import has_room, is_finite
from syncline.tracing.quality import Quality, Watch
from syncline.tracing.spans import BucketSpan, Recorder

DivideBy = Literal["world", "active"]  # ranks: all, or those that still have data

DIVIDED_EARLY = (torch.float32, torch.float64)  # sums of others are divided when they are whole
MOST_SAMPLED = 1 << 16  # entries of a bucket
NO_UNITS = (-1, Units({}))  # before the first step


@dataclass
class Coding:
    """What a codec makes of a bucket in one pass; it counts when all ranks are known to have gone through with it."""

    work: Tensor  # the values in float32, which are the side's own where they are of float32
    units: Units  # what gradients were worth when it left
    staged: State = field(default_factory=dict)
    decoder: Decoder | None = None
    said: int = 0
    encode_ns: int = 0
    sample: Sample | None = None  # in the steps in which quality is looked at


@dataclass(frozen=True)
class Sample:
    """What a bucket was before a codec had it, to compare with."""

    step: int
    norm: float  # of what was to be sent
    dense: Tensor  # some entries of the mean over ranks, had all been sent
    positions: str = ""  # how the codec wrote those of the entries that it chose


@dataclass
class Flight:
    """A bucket on its way."""

    bucket: Bucket
    side: Side
    handle: Handle
    ready_ns: int
    coding: Coding | None = None
    span: BucketSpan | None = None  # when it has arrived
    said: Callable[[], int] | None = None  # bytes, known when it has arrived

    @property
    def number(self) -> int:
        """Of the bucket."""
        return self.bucket.number

    @property
    def sent_bytes(self) -> int:
        """What was said instead of the gradients."""
        if self.said is not None:
            return self.said()
        return self.coding.said if self.coding else self.bucket.nbytes


class Pipeline:
    """Starts buckets in order and waits for them."""

    waits_for_ranks = True  # that produce the same bucket
    keeps = False  # something from pass to pass
    joined: DivideBy | None = None  # some ranks may have no data: by how many of them what comes is divided

    def __init__(self, fabric: Fabric, collective: str, recorder: Recorder) -> None:
        self.fabric = fabric
        self.collective = collective
        self.recorder = recorder

    def divisor_of(self, dtype: torch.dtype) -> int:
        """By which gradients are divided on their way into a bucket, because an engine only adds."""
        return self.fabric.world if self.collective == "engine" and dtype in DIVIDED_EARLY else 1

    def takes(self, values: Tensor) -> bool:
        """Whether what this rank has to say is finite, and stays so when it is added up."""
        return has_room(values, self.fabric.world)

    def start(self, step: int, bucket: Bucket, has_data: bool = True) -> Flight:
        """Send a bucket off, maybe only to keep others company. Its memory is the fabric's until it is waited for."""
        ready_ns = monotonic_ns()
        op: Op = "mean" if bucket.divisor == 1 else "sum"
        handle = self.fabric.all_reduce_async(bucket.side.flat, op=op, collective=self.collective)
        return Flight(bucket, bucket.side, handle, ready_ns)

    def wait(self, flight: Flight) -> None:
        """Until all that ranks have to say about the bucket is said."""
        if flight.span is not None:
            return
        waited_from_ns = monotonic_ns()
        flight.handle.wait()
        waited_to_ns = monotonic_ns()
        flight.side.finite = flight.handle.finite()
        if flight.bucket.divisor != 1:  # shares that are finite have a finite sum
            flight.side.finite = not flight.side.bad.item() or None
            flight.side.bad.zero_()
        times = flight.handle.times()
        nbytes = flight.bucket.nbytes
        flight.span = BucketSpan(
            flight.number, nbytes, flight.sent_bytes, flight.ready_ns, *times, waited_from_ns, waited_to_ns
        )
        self.recorder.buckets.append(flight.span)

    def handed_out(self, flights: Sequence[Flight]) -> None:
        """The means of these are where they are used from now on."""
        note_applied(flights)

    def finish(self, flights: Sequence[Flight], is_good: Callable[[], bool]) -> Handle | None:
        """When all these have arrived, write the means, if the pass is good; None if there is nothing to do."""
        return None

    def state_dict(self) -> Saved:
        """What is kept from step to step, by parameter."""
        return {}

    def load_state_dict(self, saved: Saved) -> None:
        """Go on from there."""

    def close(self) -> None:
        """Let threads end."""


class CodecPipeline(Pipeline):
    """Sends what a codec makes of a bucket. One thread does it all, so passes follow each other in order."""

    keeps = True

    def __init__(
        self, fabric: Fabric, collective: str, recorder: Recorder, codec: Codec, seed: int, units: Callable[[], Units]
    ) -> None:
        super().__init__(fabric, collective, recorder)
        self.codec = codec
        self.owes = codec.feedback or codec.correction is not None  # something of earlier passes
        self.talk = talk_on(fabric, collective)
        self.seed = seed
        self.units = units
        self.now: tuple[int, Units] = NO_UNITS
        self.agreed: tuple[int, Units] = NO_UNITS  # the thread's
        self.worker = Worker(f"rank {fabric.rank} encodes")
        self.memory = Memory(codec)
        self.watch = Watch()
        fabric.at_close.append(self.close)

    def divisor_of(self, dtype: torch.dtype) -> int:
        return 1  # a codec's answers are means

    def takes(self, values: Tensor) -> bool:
        return has_room(values.to(torch.float32), self.fabric.world)

    def start(self, step: int, bucket: Bucket, has_data: bool = True) -> Flight:
        side, ready_ns = bucket.side, monotonic_ns()
        joined = self.joined if self.owes else None
        coding = Coding(wide(side.values), self.units_of(step))

        def work() -> Times:
            began_ns = monotonic_ns()
            if joined is not None:
                coding.units = self.agreed_units(step, coding.units, has_data, joined)
            self.encode(step, self.coded_of(bucket), coding, side)
            return Times(began_ns, began_ns, monotonic_ns())

        return Flight(bucket, side, self.submit(work, f"bucket {bucket.number}"), ready_ns, coding)

    def units_of(self, step: int) -> Units:
        """Looked up once a step."""
        if self.now[0] != step:
            self.now = (step, self.units())
        return self.now[1]

    def agreed_units(self, step: int, units: Units, has_data: bool, divide_by: DivideBy) -> Units:
        """What gradients are worth in a step in which some ranks may have none, which ranks ask each other once.

        They will all know who had data at its end; but what was kept is added before that, and is owed as it was. A
        rank without data has left its loop, so its learning rates and its scale may be those of long ago.
        """
        if self.agreed[0] != step:
            names = sorted(units.learning_rates)
            mine = [float(has_data), units.loss_scale, *(units.learning_rates[name] for name in names)]
            told = self.fabric.all_gather(torch.tensor(mine, dtype=torch.float64, device=self.fabric.device)).tolist()
            active = [row for row in told if row[0]]
            _, loss_scale, *rates = mine if has_data or not active else active[0]
            share = self.fabric.world / max(1, len(active)) if divide_by == "active" else 1.0
            self.agreed = (step, Units(dict(zip(names, rates, strict=True)), loss_scale, share))
        return self.agreed[1]

    def submit(self, work: Callable[[], Times], what: str) -> Handle:
        """Do something in turn."""
        return self.worker.submit(work, what, self.fabric.deadlines.operation)

    def encode(self, step: int, coded: Coded, coding: Coding, side: Side) -> None:
        """Everything ranks say about a bucket. One that is not finite here, or whose sums may not be, goes as zeros.

        That is said to the others, and so is what could not be kept, before anybody keeps anything.
        """
        work = coding.work
        if work is not side.values:
            work.copy_(side.values)
        units = coding.units
        place = Place(self.fabric.rank, self.fabric.world, step, self.seed, coded.parts, units.loss_scale, units.share)
        own = coded.correct(work, place)
        dense = self.mean_of_some(work) if self.watch.is_due(step) else None
        beyond = None
        if coded.feedback is not None:
            coded.feedback.add_to(work, units)
            beyond = take_beyond(work, side.values.dtype)
        self.talk.collect(work)
        if not has_room(work, self.fabric.world):
            side.bad.fill_(1)
            work.zero_()
        norm = float(work.norm()) if dense is not None else 0.0
        staged = coded.state | own
        codec = Timed(self.codec, looks=dense is not None)
        coding.decoder, coding.said = self.talk.carry(codec, work, staged, place)
        if beyond is not None:
            work += beyond
        coding.staged = own | staged  # of those who do not talk only their own is left
        coding.encode_ns = codec.spent_ns
        if dense is not None:
            coding.sample = Sample(step, norm, dense, codec.positions)
        if not all(has_room(tensor, self.fabric.world) for tensor in to_be_kept(coded, work, coding.staged)):
            side.bad.fill_(1)
        self.fabric.all_reduce(side.tail, op="mean")

    def coded_of(self, bucket: Bucket) -> Coded:
        """What is kept of a bucket."""
        return self.memory.of(bucket.number, lambda: parts_of(bucket.slots), bucket.side.values.device)

    def finish(self, flights: Sequence[Flight], is_good: Callable[[], bool]) -> Handle:
        def work() -> Times:
            began_ns = monotonic_ns()
            if all(flight.coding and flight.coding.decoder for flight in flights):
                end = self.settle if is_good() and self.all_fit(flights) else self.give_up
                for flight in flights:
                    end(flight)
            return Times(began_ns, began_ns, monotonic_ns())

        return self.submit(work, "what a pass comes to")

    def all_fit(self, flights: Sequence[Flight]) -> bool:
        """Decode into buckets of 16 bits, which a mean may be too large for; the same on all ranks.

        This is before anything is kept of the pass, because a mean that does not fit would be lost.
        """
        narrow = [flight for flight in flights if flight.side.values.itemsize < torch.float32.itemsize]
        for flight in narrow:
            assert flight.coding is not None
            self.decode(flight, torch.empty_like(flight.coding.work))
            flight.side.bad.fill_(not is_finite(flight.side.values))
        return not any(flight.side.bad.item() for flight in narrow)

    def decode(self, flight: Flight, out: Tensor) -> None:
        """Write the mean, by way of float32."""
        coding = flight.coding
        assert coding is not None
        assert coding.decoder is not None
        began_ns = monotonic_ns()
        coding.decoder(out)
        coding.decoder = None
        self.recorder.codings.append((coding.encode_ns, monotonic_ns() - began_ns))
        if out is not flight.side.values:
            flight.side.values.copy_(out)

    def settle(self, flight: Flight) -> None:
        """Keep what was not sent, and write the mean where that has not been done."""
        coding, coded = flight.coding, self.coded_of(flight.bucket)
        assert coding is not None
        left = float(coding.work.norm()) if coding.sample is not None and coded.feedback is not None else None
        unused = unused_in(flight.bucket.slots, flight.side.flags)
        coded.commit(coding.work, coding.staged, coding.units, unused)
        if coding.decoder is not None:
            self.decode(flight, coding.work)
        if coding.sample is not None:
            self.watch.add(quality_of(flight.number, coding.sample, left, flight.side.values))

    def give_up(self, flight: Flight) -> None:
        """There is no mean of a bucket that is bad somewhere; a GradScaler is to see that, on all ranks."""
        if flight.side.bad.item() > 0:
            flight.side.values.fill_(torch.inf)

    def mean_of_some(self, values: Tensor) -> Tensor:
        """The dense mean over ranks, of some entries only: it is one more message."""
        return self.fabric.all_reduce(some_of(values).clone(), op="mean")

    def state_dict(self) -> Saved:
        return self.memory.state_dict()

    def load_state_dict(self, saved: Saved) -> None:
        self.memory.load_state_dict(saved)
        self.now = self.agreed = NO_UNITS  # steps may be counted from an earlier one again

    def close(self) -> None:
        self.worker.close(drain=False)


def note_applied(flights: Sequence[Flight]) -> None:
    """What came of these, which have arrived, is in use from here on."""
    now_ns = monotonic_ns()
    for flight in flights:
        assert flight.span is not None
        flight.span.applied_ns = now_ns


def unused_in(slots: Sequence[Slot], flags: Tensor) -> set[str]:
    """Parameters that nobody had a gradient of: they are given none, so what was kept of them stays."""
    return {slot.name for slot, flag in zip(slots, flags.tolist(), strict=True) if not flag > 0}


def take_beyond(values: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Leave what gradients of this type can hold; what is beyond that, to be kept, or None.

    Otherwise a mean with what was kept might never fit, and with it none of the steps to come.
    """
    most = torch.finfo(dtype).max
    if values.dtype == dtype or not most < float(values.abs().max()) < torch.inf:
        return None
    within = values.clamp(-most, most)
    beyond = values - within
    values.copy_(within)
    return beyond


def to_be_kept(coded: Coded, left: Tensor, staged: State) -> list[Tensor]:
    """What a pass changes if it is good: what was not sent, and new state."""
    new = [tensor for key, tensor in staged.items() if tensor is not coded.state[key]]
    return new if coded.feedback is None else [left, *new]


def some_of(values: Tensor) -> Tensor:
    """Entries all over a bucket, at a distance that is odd, so that they are not all of one column."""
    return values[:: (len(values) // MOST_SAMPLED) | 1]


def quality_of(number: int, sample: Sample, left: float | None, mean: Tensor) -> Quality:
    """How much was left out, and whether what came out points where it should.

    Where nothing is `left` to be kept, what came out is compared with what should have.
    """
    came_out = some_of(mean).to(sample.dense.dtype)
    cosine = float(torch.cosine_similarity(came_out, sample.dense, dim=0))
    if left is None:
        missing = float((came_out - sample.dense).norm()) / max(float(sample.dense.norm()), 1e-30)
        return Quality(sample.step, number, missing, 0.0, cosine, sample.positions)
    return Quality(sample.step, number, left / max(sample.norm, 1e-30), left, cosine, sample.positions)


def wide(values: Tensor) -> Tensor:
    """Memory for values in float32: their own, if they are."""
    return values if values.dtype == torch.float32 else torch.zeros_like(values, dtype=torch.float32)


def parts_of(slots: Sequence[Slot]) -> tuple[Part, ...]:
    """The parameters of a bucket by name and place."""
    parts, start = [], 0
    for slot in slots:
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
