"""With a codec: one thread encodes and decodes, and while bucket i is decoded, i+1 is on the wire and i+2 is encoded.

    encode                    gradient and residual make the values; the codec takes its first message out of them
    wire, combine, wire       a collective for each question; what the codec makes of the answer
    decode                    the mean is written into the bucket at once: nobody reads it before the status
    status                    leaves when the last bucket has asked its last question: then no rank can fail alone
    commit                    residuals change places if the pass is good; nothing has changed if it is not

What is decoded has the same bits on all ranks, so whether it fits the bucket needs no vote. Where memory is scarcer
than time (`lean`) the codec works in the bucket itself, and decodes when the status is known.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic_ns
from typing import Any

import torch
from torch import Tensor

from syncline.codecs.codec import Codec, ReduceContext
from syncline.codecs.conversation import Conversation, Decoder, Gather, Question
from syncline.codecs.entries import positions_of
from syncline.codecs.none import void
from syncline.core.status import OwnStatus, PassStatus
from syncline.errors import FabricError
from syncline.fabric.base import Fabric, Times
from syncline.guards.finite import is_finite, largest_of, magnitude_fits, sum_fits
from syncline.path.answerer import Asked, FlatAnswerer
from syncline.path.bucket import Bucket, parts_of
from syncline.path.codec_state import BucketCodecState, CodecStateStore, PendingEncoding, Saved
from syncline.path.hierarchical import HierarchicalAnswerer
from syncline.path.path import DivideBy, Path, StatusWork, met_by
from syncline.path.residuals import GradientScale
from syncline.path.sampling import Sample, quality_of, some_of
from syncline.path.task_thread import Order, TaskThread
from syncline.path.work import BucketWork, PassWork, StageName, Stamp
from syncline.tracing.quality import Watch
from syncline.tracing.spans import Recorder

DECODE, COMBINE, ENCODE = range(3)  # the order in which tasks are taken up
AHEAD = 3  # buckets that are encoded and not decoded: more would hold more memory and keep no link busier
NO_SCALE = (-1, GradientScale({}))  # before the first pass


@dataclass(eq=False)
class CodedWork(BucketWork):
    """A bucket in the hands of a codec."""

    scale: GradientScale = field(default_factory=lambda: GradientScale({}))
    context: ReduceContext | None = None
    pending: PendingEncoding | None = None
    conversation: Conversation | None = None
    index: int = 0  # among the buckets of its pass
    rounds: int = 1  # questions that the codec asks
    asked: int = 0
    answer: Asked | None = None  # to the last question
    decoder: Decoder | None = None
    sample: Sample | None = None  # in the passes in which quality is looked at
    positions: str = ""  # how the codec wrote those of the entries that it chose

    def stamp(self, stage: StageName, began_ns: int) -> None:
        """Note that a stage has ended."""
        self.stamps.append(Stamp(stage, began_ns, monotonic_ns()))

    def spent_ns(self, *stages: StageName) -> int:
        """How long the bucket was in these stages."""
        return sum(stamp.ended_ns - stamp.began_ns for stamp in self.stamps if stamp.stage in stages)


@dataclass(eq=False)
class CodedPass(PassWork):
    """A pass in the hands of a codec."""

    joined: DivideBy | None = None
    is_sealed: bool = False  # all its buckets have come to the thread
    answered: dict[tuple[int, int], CodedWork] = field(default_factory=dict)  # by question and index, not gone on with
    combined: Counter[int] = field(default_factory=Counter)  # buckets that have gone on, by question
    begun: int = 0  # buckets that are encoded
    settled: int = 0  # buckets that have asked their last question
    decoded: int = 0
    ended: threading.Event = field(default_factory=threading.Event)  # all is committed or discarded, or has failed
    known: threading.Event = field(default_factory=threading.Event)  # the status, or that it has failed
    ended_ns: int = 0  # when the status had come
    error: BaseException | None = None
    overflowed: set[int] = field(default_factory=set)  # buckets of 16 bits that cannot hold their mean


class CodedPath(Path):
    """Sends what a codec makes of buckets. One thread does it, so passes follow each other in order."""

    has_residuals = True

    def __init__(
        self,
        fabric: Fabric,
        collective: str,
        recorder: Recorder,
        codec: Codec,
        seed: int,
        scale: Callable[[], GradientScale],
        answerer: FlatAnswerer | HierarchicalAnswerer | None,
        lean: bool = False,
    ) -> None:
        """`answerer` is None in a world of one, where there is nobody to ask and nothing is left out."""
        super().__init__(fabric, collective, recorder)
        self.codec = codec
        self.seed = seed
        self.find_scale = scale
        self.answerer = answerer
        self.lean = lean
        self.channel = fabric.channel()
        self.follows_earlier = codec.feedback or codec.correction is not None  # what is sent depends on earlier passes
        self.scale_now: tuple[int, GradientScale] = NO_SCALE
        self.scale_agreed: tuple[int, GradientScale] = NO_SCALE  # the thread's
        self.store = CodecStateStore(codec)
        self.watch = Watch()
        self.current: CodedPass | None = None  # that the thread is in, from its first bucket to its commit
        self.parked: list[tuple[Order, Callable[[], None]]] = []  # tasks of the next pass, until this one is committed
        self.error: BaseException | None = None  # after which nothing goes on
        self.thread = TaskThread(f"rank {fabric.rank} encodes")
        fabric.at_close.append(self.close)

    def takes(self, values: Tensor) -> bool:
        return sum_fits(values.to(torch.float32), self.fabric.world)

    # On the user's threads

    def begin(self, number: int, has_data: bool = True) -> CodedPass:
        return CodedPass(number, has_data, joined=self.joined if self.follows_earlier else None)

    def start(self, current: PassWork, bucket: Bucket) -> None:
        assert isinstance(current, CodedPass)
        work = CodedWork(bucket, bucket.buffer, scale=self.scale_of(current.number), index=len(current.works))
        current.works.append(work)
        self._put_in_order(current, work.index, partial(self._encode, current, work))

    def scale_of(self, number: int) -> GradientScale:
        """What gradients are worth in a pass, looked up once."""
        if self.scale_now[0] != number:
            self.scale_now = (number, self.find_scale())
        return self.scale_now[1]

    def end(self, current: PassWork, own: OwnStatus) -> None:
        assert isinstance(current, CodedPass)
        self._put_in_order(current, len(current.works), partial(self._seal, current, own))

    def _put_in_order(self, current: CodedPass, index: int, task: Callable[[], None]) -> None:
        """Give the thread a task of a pass, which begins when the pass before it is committed."""
        order = (ENCODE, current.number, index)

        def begin() -> None:
            is_next = self.current in (None, current)
            if not is_next or current.begun - current.decoded >= AHEAD:
                self.parked.append((order, begin))
                return
            self.current = current
            self._guarded(current, task)

        self.thread.put(order, begin)

    def wait_for_status(self, current: PassWork) -> PassStatus:
        assert isinstance(current, CodedPass)
        self._wait_for(current, current.known)
        assert current.status is not None
        return current.status

    def wait(self, current: PassWork) -> PassStatus:
        assert isinstance(current, CodedPass)
        if not current.is_complete:
            from_ns = monotonic_ns()
            self._wait_for(current, current.ended)
            self._note_spans(current, from_ns, monotonic_ns())
            current.is_complete = True
        assert current.status is not None
        return current.status

    def _wait_for(self, current: CodedPass, event: threading.Event) -> None:
        """Wait, and do meanwhile what is to be done; all that is waited for has a deadline, and Ctrl-C is heard."""
        self.thread.help_until(event)
        if current.error is not None:
            raise current.error

    def _note_spans(self, current: CodedPass, from_ns: int, to_ns: int) -> None:
        """A bucket was waited for from when the one before it was there."""
        before_ns = from_ns
        for work in current.works:
            assert isinstance(work, CodedWork)
            ended_ns = max(stamp.ended_ns for stamp in work.stamps if stamp.stage != "commit")
            times = met_by(Times(work.stamps[0].began_ns, work.stamps[0].began_ns, ended_ns), current.ended_ns)
            arrived_ns = min(max(before_ns, ended_ns), to_ns)
            self.note_span(work, times, before_ns, max(arrived_ns, ended_ns))
            self.recorder.codings.append((work.spent_ns("encode", "combine"), work.spent_ns("decode")))
            before_ns = arrived_ns
        self.recorder.waited(before_ns, to_ns)

    # On the codec's thread

    def _guarded(self, current: CodedPass, work: Callable[[], None]) -> None:
        """What goes wrong here ends this pass and all that come; the other ranks are told, who would wait."""
        if self.error is not None:
            self._fail(current, self.error)
            return
        try:
            work()
        except FabricError as error:
            self._fail(current, error)
        except BaseException as error:
            self._fail(current, error)
            self.channel.abort(f"gave up a bucket of pass {current.number}: {error!r}")

    def _fail(self, current: CodedPass, error: BaseException) -> None:
        """Tell whoever waits for the pass; those that come later are told when they come."""
        self.error = current.error = error
        current.known.set()
        current.ended.set()
        self.current = None
        self._unpark()

    def _unpark(self) -> None:
        """Look again at what had to wait."""
        parked, self.parked = self.parked, []
        for order, task in parked:
            self.thread.put(order, task)

    def _encode(self, current: CodedPass, work: CodedWork) -> None:
        """Make the values of a bucket, and ask the first question."""
        began_ns = monotonic_ns()
        current.begun += 1
        coded = self.state_of(work.bucket)
        if current.joined is not None:
            work.scale = self._agreed_scale(current, work.scale, current.joined)
        work.context = self._context(coded, work.scale)
        work.rounds = self.codec.rounds(work.context.step)
        dense: list[Tensor] = []

        def look(gradient: Tensor) -> None:
            if self.watch.is_due(self.good_passes + 1):
                dense.append(self._mean_of_some(gradient))

        work.pending = pending = coded.prepare(work.buffer.values, work.scale, work.context, self.lean, look)
        if isinstance(self.answerer, HierarchicalAnswerer):
            self.answerer.add_up(pending.values)
            pending.largest = largest_of(pending.values) if len(pending.values) else 0.0
        if not magnitude_fits(pending.largest, len(pending.values) * self.fabric.world):
            self._own(current).nonfinite.add(work.number)
            pending.values.zero_()
        if dense:
            work.sample = Sample(work.context.step, float(pending.values.norm()), dense[0])
        if isinstance(self.answerer, FlatAnswerer):
            work.conversation = self.codec.reduce(pending.values, pending.state, work.context)
            self._advance(current, work, "encode", began_ns)
            return
        self._converse(work, pending)
        work.stamp("encode", began_ns)
        self._settle(current, work)
        self._decode(current, work)

    def _converse(self, work: CodedWork, pending: PendingEncoding) -> None:
        """Carry a whole conversation through: between hosts, or in a world of one, where nothing is left out."""
        assert work.context is not None
        if isinstance(self.answerer, HierarchicalAnswerer):
            coded, own = self.state_of(work.bucket), dict(pending.state)
            corrected = {key: value for key, value in own.items() if value is not coded.state.get(key)}
            work.decoder, work.sent_bytes = self.answerer.run(self.codec, pending.values, pending.state, work.context)
            if self.answerer.leaders is None:
                pending.state = corrected  # ranks that do not talk have no state of the codec
            return
        mean = pending.values.clone()
        pending.values.zero_()
        work.decoder = lambda out: void(out.copy_(mean))

    def _advance(self, current: CodedPass, work: CodedWork, stage: StageName, began_ns: int) -> None:
        """Give the codec its answer, and ask what it asks next, or write what it has come to."""
        assert work.conversation is not None
        answer: Any = work.answer.read() if work.answer is not None else None
        try:
            question = work.conversation.send(answer)
        except StopIteration as end:
            work.decoder, work.conversation, work.answer = end.value, None, None
            self._decode(current, work)
            return
        work.stamp(stage, began_ns)
        self._ask(current, work, question)
        if work.asked == work.rounds:
            self._settle(current, work)

    def _ask(self, current: CodedPass, work: CodedWork, question: Question) -> None:
        """Start a collective; when it is over, this thread goes on with the bucket."""
        assert isinstance(self.answerer, FlatAnswerer)
        if work.sample is not None and isinstance(question, Gather) and question.has_entries:
            work.positions = positions_of(question.message)
        work.sent_bytes += question.said_bytes(self.fabric.rank)
        began_ns = monotonic_ns()
        work.answer = asked = self.answerer.ask(question, work.asked)
        work.asked += 1
        order = (DECODE if work.asked == work.rounds else COMBINE, current.number, work.index)
        went_on = partial(self._guarded, current, partial(self._take_answer, current, work, asked, began_ns))
        asked.handle.on_done(lambda: self.thread.put(order, went_on))

    def _take_answer(self, current: CodedPass, work: CodedWork, asked: Asked, asked_ns: int) -> None:
        """Go on with a bucket; to ask again, buckets keep their order, which must be the same on all ranks."""
        asked.handle.wait()
        work.stamps.append(Stamp("wire", asked_ns, max(asked.handle.times().ended_ns, asked_ns)))
        if work.asked == work.rounds:
            self._advance(current, work, "combine", monotonic_ns())
            return
        question = work.asked
        current.answered[question, work.index] = work
        while (ready := current.answered.pop((question, current.combined[question]), None)) is not None:
            current.combined[question] += 1
            self._advance(current, ready, "combine", monotonic_ns())

    def _settle(self, current: CodedPass, work: CodedWork) -> None:
        """A bucket has asked its last question, so what it leaves is known on this rank."""
        assert work.pending is not None
        if not self.state_of(work.bucket).fits(work.pending, self.fabric.world):
            self._own(current).nonfinite.add(work.number)
        current.settled += 1
        self._send_status(current)

    def _seal(self, current: CodedPass, own: OwnStatus) -> None:
        """All buckets of the pass have come to this thread."""
        own.nonfinite |= self._own(current).nonfinite
        current.own = own
        current.is_sealed = True
        self._send_status(current)

    def _own(self, current: CodedPass) -> OwnStatus:
        """What this rank has to say of the pass, as far as it is known."""
        if current.own is None:
            current.own = OwnStatus(current.number, 0)
        return current.own

    def _send_status(self, current: CodedPass) -> None:
        """Let the status leave when every bucket has asked its last question."""
        if not current.is_sealed or current.settled < len(current.works):
            return
        status = StatusWork(self.channel, current, self._own(current))

        def arrived() -> None:
            status.wait()
            current.ended_ns = monotonic_ns()
            current.known.set()
            self._commit_if_complete(current)

        order = (DECODE, current.number, -1)
        status.handle.on_done(lambda: self.thread.put(order, partial(self._guarded, current, arrived)))

    def _decode(self, current: CodedPass, work: CodedWork) -> None:
        """Write the mean, unless the bucket still holds what is to be kept: then it is written when that is kept."""
        assert work.pending is not None
        work.pending.end()
        holds_residual = self.codec.feedback and work.pending.values is work.buffer.values
        if not holds_residual:
            self._write_mean(current, work)
        current.decoded += 1
        current.arrived += 1
        self._unpark()
        self._commit_if_complete(current)

    def _write_mean(self, current: CodedPass, work: CodedWork) -> None:
        """Write the mean by way of float32."""
        assert work.decoder is not None
        began_ns = monotonic_ns()
        values = work.buffer.values
        out = values if values.dtype == torch.float32 else torch.empty_like(values, dtype=torch.float32)
        work.decoder(out)
        work.decoder = None
        if out is not values:
            values.copy_(out)
            if values.itemsize < out.itemsize and not is_finite(values):
                current.overflowed.add(work.number)
        work.stamp("decode", began_ns)

    def _commit_if_complete(self, current: CodedPass) -> None:
        """When the status is known and all buckets are decoded, keep what the pass has left, or nothing of it."""
        if current.status is None or current.decoded < len(current.works):
            return
        if current.overflowed:
            both = sorted({*current.status.nonfinite, *current.overflowed})
            current.status = replace(current.status, nonfinite=tuple(both))
        is_good = current.status.is_good
        unused = current.unused_names() if is_good else set()
        for work in current.works:
            assert isinstance(work, CodedWork)
            if is_good:
                self._commit(current, work, unused)
                if self.codec.stays_finite and work.buffer.values.dtype == torch.float32:
                    work.buffer.finite = True
            else:
                self._discard(work, current.status)
            work.pending = work.decoder = None
        self.good_passes += is_good
        current.ended.set()
        self.current = None
        self._unpark()

    def _commit(self, current: CodedPass, work: CodedWork, unused: set[str]) -> None:
        """Keep the residual of a bucket and the state of its codec."""
        assert work.pending is not None
        began_ns = monotonic_ns()
        coded = self.state_of(work.bucket)
        left = float(work.pending.values.norm()) if work.sample is not None and coded.residual is not None else None
        coded.commit(work.pending, unused)
        work.stamp("commit", began_ns)
        if work.decoder is not None:
            self._write_mean(current, work)
        if work.sample is not None:
            self.watch.add(quality_of(work.number, work.sample, left, work.buffer.values, work.positions))

    def _discard(self, work: CodedWork, status: PassStatus) -> None:
        """Leave no mean of a pass that nobody uses; where a bucket is not finite a GradScaler is to see that."""
        if work.number in status.nonfinite:
            work.buffer.values.fill_(torch.inf)
        else:
            work.buffer.values.zero_()

    def state_of(self, bucket: Bucket) -> BucketCodecState:
        """Codec state and residual of a bucket."""
        return self.store.of(bucket.number, lambda: parts_of(bucket.slots), bucket.buffer.values.device)

    def _context(self, coded: BucketCodecState, scale: GradientScale) -> ReduceContext:
        """Where and when a bucket is encoded. Good passes count as steps: one that was skipped never happened."""
        return ReduceContext(
            self.fabric.rank,
            self.fabric.world,
            self.good_passes + 1,
            self.seed,
            coded.parts,
            scale.loss_scale,
            scale.share,
        )

    def _agreed_scale(self, current: CodedPass, scale: GradientScale, divide_by: DivideBy) -> GradientScale:
        """What gradients are worth in a pass in which some ranks may have none, which ranks ask each other once.

        They will all know who had data at its end; but residuals are added before that, and count as they did. A rank
        without data has left its loop, so its learning rates and its scale may be those of long ago.
        """
        if self.scale_agreed[0] != current.number:
            names = sorted(scale.learning_rates)
            mine = [float(current.has_data), scale.loss_scale, *(scale.learning_rates[name] for name in names)]
            row = torch.tensor(mine, dtype=torch.float64, device=self.fabric.device)
            gathered = self.fabric.all_gather(row).tolist()
            active = [theirs for theirs in gathered if theirs[0]]
            _, loss_scale, *rates = mine if current.has_data or not active else active[0]
            share = self.fabric.world / max(1, len(active)) if divide_by == "active" else 1.0
            agreed = GradientScale(dict(zip(names, rates, strict=True)), loss_scale, share)
            self.scale_agreed = (current.number, agreed)
        return self.scale_agreed[1]

    def _mean_of_some(self, values: Tensor) -> Tensor:
        """The dense mean over ranks, of some entries only: it is one more collective."""
        return self.fabric.all_reduce(some_of(values).to(torch.float32, copy=True), op="mean")

    # To be saved and restored

    def state_dict(self) -> Saved:
        return self.store.state_dict()

    def load_state_dict(self, saved: Saved) -> None:
        self.store.load_state_dict(saved)
        self.scale_now = self.scale_agreed = NO_SCALE  # passes may be counted from an earlier one again

    def close(self) -> None:
        self.thread.close()
