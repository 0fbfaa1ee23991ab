"""With a codec: one task at a time takes buckets through their stages; while one is on the wire another is encoded.

    encode                    gradient and residual make the values; the codec takes its first message out of them
    wire, combine, wire       a collective for each question; what the codec makes of the answer
    decode                    the mean is written into the bucket at once: nobody reads it before the status
    status                    leaves when the last bucket has asked its last question: then no rank can fail alone
    commit                    residuals change places if the pass is good; nothing has changed if it is not

Which of these there are, and in which order, is said by a list (`stages.py`). What is decoded has the same bits on all
ranks, so whether it fits the bucket needs no vote. Where memory is scarcer than time (`lean`) the codec works in the
bucket itself, and decodes when the status is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic_ns

import torch
from torch import Tensor

from syncline.codecs.codec import Codec
from syncline.core.status import OwnStatus, PassStatus
from syncline.errors import FabricError
from syncline.fabric.base import Fabric
from syncline.fabric.handle import Times
from syncline.guards.finite import sum_fits
from syncline.path.answerer import Answerer, Asked
from syncline.path.codec_stages import CodecStages
from syncline.path.codec_state import CodecStateStore, Saved
from syncline.path.coded_work import CodedPass, CodedWork
from syncline.path.path import DivideBy, Path, StatusWork
from syncline.path.residuals import GradientScale
from syncline.path.stages import Stage
from syncline.path.task_thread import Order, TaskThread
from syncline.path.work import GradientBucket, PassWork
from syncline.tracing.quality import Watch
from syncline.tracing.spans import Recorder

DECODE, COMBINE, ENCODE = range(3)  # the order in which tasks are taken up
AHEAD = 3  # buckets that are encoded and not decoded: more would hold more memory and keep no link busier
NO_SCALE = (-1, GradientScale({}))  # before the first pass


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
        answerer: Answerer,
        lean: bool = False,
    ) -> None:
        super().__init__(fabric, collective, recorder)
        self.find_scale = scale
        self.answerer = answerer
        self.channel = fabric.channel()
        self.follows_earlier = codec.feedback or codec.correction is not None  # what is sent depends on earlier passes
        self.scale_now: tuple[int, GradientScale] = NO_SCALE
        self.scale_agreed: tuple[int, GradientScale] = NO_SCALE  # the thread's
        self.store = CodecStateStore(codec)
        self.watch = Watch()
        self.stages = CodecStages(fabric, codec, answerer, self.store, self.watch, seed, lean)
        self.current: CodedPass | None = None  # that the thread is in, from its first bucket to its commit
        self.parked: list[tuple[Order, Callable[[], None]]] = []  # tasks of the next pass, until this one is committed
        self.error: BaseException | None = None  # after which nothing goes on
        self.thread = TaskThread(f"rank {fabric.rank} encodes", fabric.device)
        fabric.at_close.append(self.close)

    def takes(self, values: Tensor) -> bool:
        return sum_fits(values.to(torch.float32), self.fabric.world)

    # On the user's threads

    def begin(self, number: int, has_data: bool = True) -> CodedPass:
        return CodedPass(number, has_data, joined=self.joined if self.follows_earlier else None)

    def start(self, current: PassWork, bucket: GradientBucket) -> None:
        assert isinstance(current, CodedPass)
        work = CodedWork(bucket, bucket.buffer, scale=self.scale_of(current.number), index=len(current.works))
        current.add(work)
        self._put_in_order(current, work.index, partial(self._begin, current, work))

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
            if not is_next or current.begun - current.arrived >= AHEAD:
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
            began_ns = next(stamp.began_ns for stamp in work.stamps if stamp.stage == "encode")
            ended_ns = max(stamp.ended_ns for stamp in work.stamps if stamp.stage not in ("status", "commit"))
            times = self.met(current, work.index, Times(began_ns, began_ns, ended_ns), current.ended_ns)
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
            self.fabric.abort(f"gave up a bucket of pass {current.number}: {error!r}")

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

    def _begin(self, current: CodedPass, work: CodedWork) -> None:
        """Begin with a bucket. Good passes count as steps: one that was skipped never happened."""
        current.begun += 1
        if current.joined is not None:
            work.scale = self._agreed_scale(current, work.scale, current.joined)
        self.stages.begin(work, self.good_passes + 1)
        self._go_on(current, work)

    def _go_on(self, current: CodedPass, work: CodedWork) -> None:
        """Take a bucket through its stages, up to one that has to be waited for."""
        while (stage := work.stage) is not None:
            if stage.name == "wire":
                self._ask(current, work, stage)
                if not self.answerer.waits:
                    return
                continue
            if stage.settles:
                self._settle(current, work)
            if stage.name == "status":
                self._await_status(current, work)
                return
            self.stages.carry_out(work, stage)

    def _ask(self, current: CodedPass, work: CodedWork, stage: Stage) -> None:
        """Start a collective; when it is over, this thread goes on with the bucket."""
        began_ns = monotonic_ns()
        work.answer = asked = self.stages.ask(work, stage)
        if stage.settles:
            self._settle(current, work)
        if self.answerer.waits:
            work.end_stage(began_ns)
            return
        order = (DECODE if stage.settles else COMBINE, current.number, work.index)
        went_on = partial(self._guarded, current, partial(self._take_answer, current, work, asked, began_ns))
        asked.handle.on_done(lambda: self.thread.put(order, went_on, asked.handle.lends_thread()))

    def _take_answer(self, current: CodedPass, work: CodedWork, asked: Asked, asked_ns: int) -> None:
        """Go on with a bucket; to ask again, buckets keep their order, which must be the same on all ranks."""
        stage = work.stage
        assert stage is not None
        asked.handle.wait()
        work.end_stage(asked_ns, max(asked.handle.times().ended_ns, asked_ns))
        if stage.settles:
            self._go_on(current, work)
            return
        current.answered[stage.number, work.index] = work
        while (ready := current.answered.pop((stage.number, current.combined[stage.number]), None)) is not None:
            current.combined[stage.number] += 1
            self._go_on(current, ready)

    # The status

    def _settle(self, current: CodedPass, work: CodedWork) -> None:
        """What a bucket leaves is known on this rank."""
        if not self.stages.fits(work):
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
        """Let the status leave when all buckets are settled."""
        if not current.is_sealed or current.settled < len(current.works):
            return
        current.left_ns = monotonic_ns()
        status = StatusWork(self.channel, current, self._own(current), self.readiness)

        def arrived() -> None:
            status.wait()
            current.ended_ns = monotonic_ns()
            current.known.set()
            self._commit_if_complete(current)

        order = (DECODE, current.number, -1)
        went_on = partial(self._guarded, current, arrived)
        status.handle.on_done(lambda: self.thread.put(order, went_on, status.handle.lends_thread()))

    def _await_status(self, current: CodedPass, work: CodedWork) -> None:
        """All is done with a bucket that can be done before the status is known."""
        assert work.pending is not None
        work.pending.end()
        current.arrived += 1
        self._unpark()
        self._commit_if_complete(current)

    def _commit_if_complete(self, current: CodedPass) -> None:
        """When the status is known and all buckets wait for it, keep what the pass has left, or nothing of it."""
        if current.status is None or current.arrived < len(current.works):
            return
        works = [work for work in current.works if isinstance(work, CodedWork)]
        if nonfinite := {work.number for work in works if work.is_finite is False}:
            both = sorted({*current.status.nonfinite, *nonfinite})
            current.status = replace(current.status, nonfinite=tuple(both))
        is_good = current.status.is_good
        unused = current.unused_names() if is_good else set()
        for work in works:
            work.end_stage(current.left_ns, current.ended_ns)
            work.unused = unused
            if is_good:
                self._go_on(current, work)
                stays_finite = self.stages.codec.stays_finite and work.buffer.values.dtype == torch.float32
                work.buffer.finite = stays_finite or work.is_finite
            self.stages.end(work, current.status)
        self.good_passes += is_good
        current.ended.set()
        self.current = None
        self._unpark()

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

    # To be saved and restored

    def state_dict(self) -> Saved:
        return self.store.state_dict()

    def load_state_dict(self, saved: Saved) -> None:
        self.store.load_state_dict(saved)
        self.scale_now = self.scale_agreed = NO_SCALE  # passes may be counted from an earlier one again

    def close(self) -> None:
        self.thread.close()
