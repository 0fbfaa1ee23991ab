"""What is done with a bucket in each stage that is a codec's, or inside a host; the path says when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic_ns

import torch
from torch import Tensor

from syncline.codecs.codec import Codec, ReduceContext
from syncline.codecs.conversation import Gather
from syncline.codecs.entries import positions_of
from syncline.codecs.none import void
from syncline.core.parts import parts_of
from syncline.core.status import PassStatus
from syncline.errors import ConfigError
from syncline.fabric.base import Fabric
from syncline.guards.finite import is_finite, largest_of, magnitude_fits
from syncline.path.answerer import Answerer, Asked
from syncline.path.codec_state import BucketCodecState, CodecStateStore
from syncline.path.coded_work import CodedWork
from syncline.path.hierarchical import HierarchicalAnswerer
from syncline.path.sampling import Sample, quality_of, some_of
from syncline.path.stages import Stage, StageName, stages_of
from syncline.path.work import GradientBucket
from syncline.tracing.quality import Watch


class CodecStages:
    """Carries out the stages of buckets, one at a time."""

    def __init__(
        self,
        fabric: Fabric,
        codec: Codec,
        answerer: Answerer,
        store: CodecStateStore,
        watch: Watch,
        seed: int,
        lean: bool,
    ) -> None:
        self.fabric = fabric
        self.codec = codec
        self.answerer = answerer
        self.store = store
        self.watch = watch
        self.seed = seed
        self.lean = lean
        self.work_of: dict[StageName, Callable[[CodedWork], None]] = {
            "encode": self._encode,
            "sum": self._sum,
            "combine": self._converse,
            "decode": self._decode,
            "spread": self._spread,
            "commit": self._commit,
        }

    def begin(self, work: CodedWork, step: int) -> None:
        """Find out which stages a bucket goes through in a step."""
        coded, scale, fabric = self.state_of(work.bucket), work.scale, self.fabric
        work.context = ReduceContext(
            fabric.rank, fabric.world, step, self.seed, coded.parts, scale.loss_scale, scale.share
        )
        dtype, phase = work.buffer.values.dtype, self.codec.phase(step)
        if coded.stages is None or coded.phase != phase:
            coded.stages = stages_of(self.codec, coded.parts, dtype, step, self.answerer.route, self.lean)
            coded.phase = phase
        work.stages = coded.stages

    def carry_out(self, work: CodedWork, stage: Stage) -> None:
        """Carry out the stage that comes next, and leave its stamp."""
        began_ns = monotonic_ns()
        self.work_of[stage.name](work)
        work.end_stage(began_ns)

    def ask(self, work: CodedWork, stage: Stage) -> Asked:
        """Start the collective that answers the question of a bucket, which must be as it was declared."""
        question = work.question
        assert question is not None
        if question.declaration != stage.question:
            raise ConfigError(
                f"codec {self.codec.name} asks {question.declaration} where it has declared {stage.question}; "
                f"questions() and reduce() must agree"
            )
        if work.sample is not None and isinstance(question, Gather) and question.has_entries:
            work.positions = positions_of(question.message)
        work.sent_bytes += question.said_bytes(self.answerer.route.talker)
        return self.answerer.ask(question, stage)

    def fits(self, work: CodedWork) -> bool:
        """Whether the values of a bucket could be added up, and what it leaves can be added up again."""
        assert work.pending is not None
        return work.is_sound and self.state_of(work.bucket).fits(work.pending, self.fabric.world)

    def end(self, work: CodedWork, status: PassStatus) -> None:
        """Compare what came out with what should have, where a sample was taken, or leave no mean of a bad pass.

        Where a bucket is not finite a GradScaler is to see that.
        """
        values = work.buffer.values
        if not status.is_good:
            values.fill_(torch.inf if work.number in status.nonfinite else 0.0)
        elif work.sample is not None:
            self.watch.add(quality_of(work.number, work.sample, work.left, values, work.positions))
        work.pending = work.decoder = None

    def state_of(self, bucket: GradientBucket) -> BucketCodecState:
        """Codec state and residual of a bucket."""
        return self.store.of(bucket.number, lambda: parts_of(bucket.slots), bucket.buffer.values.device)

    # Stages

    def _encode(self, work: CodedWork) -> None:
        """Make the values of a bucket, and the first question; between hosts their sum comes between the two."""
        if work.pending is None:
            self._prepare(work)
            if work.is_followed_by == "sum":
                return
            self._look_at(work)
        assert work.pending is not None
        assert work.context is not None
        work.conversation = self.answerer.begin(self.codec, work.pending.values, work.pending.state, work.context)
        self._converse(work)

    def _prepare(self, work: CodedWork) -> None:
        """Add gradient and residual."""
        assert work.context is not None
        dense: list[Tensor] = []

        def look(gradient: Tensor) -> None:
            if work.context is not None and self.watch.is_due(work.context.step):
                dense.append(self._mean_of_some(gradient))

        coded = self.state_of(work.bucket)
        is_measured = not self.codec.carries_nonfinite
        work.pending = coded.prepare(work.buffer.values, work.scale, work.context, self.lean, look, is_measured)
        if dense:
            work.sample = Sample(work.context.step, 0.0, dense[0])

    def _mean_of_some(self, values: Tensor) -> Tensor:
        """The dense mean over ranks, of some entries only: it is one more collective."""
        return self.fabric.all_reduce(some_of(values).to(torch.float32, copy=True), op="mean")

    def _look_at(self, work: CodedWork) -> None:
        """Send zeros in place of values that are not finite, or too large to be added up."""
        assert work.pending is not None
        values = work.pending.values
        fits = magnitude_fits(work.pending.largest, len(values) * self.fabric.world)
        work.is_sound = fits or self.codec.carries_nonfinite
        if not work.is_sound:
            values.zero_()
        if work.sample is not None:
            work.sample = replace(work.sample, norm=float(values.norm()))

    def _sum(self, work: CodedWork) -> None:
        """Add up the values of a host; who does not talk leaves them to who does, and has no state of the codec."""
        assert isinstance(self.answerer, HierarchicalAnswerer)
        assert work.pending is not None
        pending, before = work.pending, self.state_of(work.bucket).state
        self.answerer.add_up(pending.values)
        pending.largest = largest_of(pending.values) if len(pending.values) else 0.0
        self._look_at(work)
        if not self.answerer.route.talks:
            pending.values.zero_()
            pending.state = {key: value for key, value in pending.state.items() if value is not before.get(key)}

    def _converse(self, work: CodedWork) -> None:
        """Give the codec its answer; it comes to its next question, or to what writes the mean, as it has declared."""
        assert work.conversation is not None
        answer = work.answer.read() if work.answer is not None else None
        try:
            work.question = work.conversation.send(answer)
        except StopIteration as end:
            work.decoder, work.conversation, work.question = end.value, None, None
        work.answer = None
        is_expected = work.is_followed_by == "wire"
        if is_expected != (work.question is not None):
            declared = sum(stage.name == "wire" for stage in work.stages)
            raise ConfigError(
                f"codec {self.codec.name} has declared {declared} questions, and asks "
                f"{'fewer' if is_expected else 'more'}; questions() and reduce() must agree"
            )

    def _decode(self, work: CodedWork) -> None:
        """Write the mean: for the other ranks of a host, or into the bucket by way of float32."""
        assert work.pending is not None
        if work.decoder is None:
            self._converse(work)
        assert work.decoder is not None
        if work.is_followed_by == "spread":
            work.mean = torch.empty_like(work.pending.values)
            work.decoder(work.mean)
            return
        values = work.buffer.values
        out = values if values.dtype == torch.float32 else torch.empty_like(values, dtype=torch.float32)
        work.is_finite = work.decoder(out)
        work.decoder = None
        if out is not values:
            values.copy_(out)
        if self.codec.carries_nonfinite or values.itemsize < out.itemsize:
            is_known = work.is_finite is not None and out is values
            work.is_finite = work.is_finite if is_known else is_finite(values)

    def _spread(self, work: CodedWork) -> None:
        """Take the mean from the rank that talks for the host."""
        assert isinstance(self.answerer, HierarchicalAnswerer)
        assert work.pending is not None
        mean = work.mean if work.mean is not None else torch.empty_like(work.pending.values)
        self.answerer.spread(mean)
        work.mean, work.decoder = None, lambda out: void(out.copy_(mean))

    def _commit(self, work: CodedWork) -> None:
        """Keep the residual of a bucket and the state of its codec."""
        assert work.pending is not None
        coded = self.state_of(work.bucket)
        if work.sample is not None and coded.residual is not None:
            work.left = float(work.pending.values.norm())
        coded.commit(work.pending, work.unused)
