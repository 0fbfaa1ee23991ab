"""What is under way in the hands of a codec: a bucket, which goes through its stages one by one, and a pass."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic_ns

from torch import Tensor

from syncline.codecs.codec import ReduceContext
from syncline.codecs.conversation import Conversation, Decoder, Question
from syncline.path.answerer import Asked
from syncline.path.codec_state import PendingEncoding
from syncline.path.path import DivideBy
from syncline.path.residuals import GradientScale
from syncline.path.sampling import Sample
from syncline.path.stages import Stage, StageName
from syncline.path.work import BucketWork, PassWork, Stamp


@dataclass(eq=False)
class CodedWork(BucketWork):
    """A bucket in the hands of a codec. It has as many stamps as stages have ended."""

    scale: GradientScale = field(default_factory=lambda: GradientScale({}))
    index: int = 0  # among the buckets of its pass
    stages: tuple[Stage, ...] = ()  # once a codec has begun with it
    context: ReduceContext | None = None
    pending: PendingEncoding | None = None
    conversation: Conversation | None = None
    question: Question | None = None  # to be asked
    answer: Asked | None = None  # to the last question
    mean: Tensor | None = None  # for the other ranks of a host
    decoder: Decoder | None = None
    is_sound: bool = True  # its values are finite on this rank, and can be added up
    is_finite: bool | None = None  # the mean in the bucket, the same on all ranks; None where nobody has looked
    unused: set[str] = field(default_factory=set)  # parameters that no rank had a gradient of, in a good pass
    sample: Sample | None = None  # in the passes in which quality is looked at
    positions: str = ""  # how the codec wrote those of the entries that it chose
    left: float | None = None  # norm of the residual, in those passes

    @property
    def stage(self) -> Stage | None:
        """The stage that comes next, or is under way; None at the end."""
        return self.stages[len(self.stamps)] if len(self.stamps) < len(self.stages) else None

    @property
    def is_followed_by(self) -> StageName | None:
        """The name of the stage behind that one."""
        after = len(self.stamps) + 1
        return self.stages[after].name if after < len(self.stages) else None

    def end_stage(self, began_ns: int, ended_ns: int = 0) -> None:
        """Go on to the next stage."""
        self.stamps.append(Stamp(self.stages[len(self.stamps)].name, began_ns, ended_ns or monotonic_ns()))

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
    begun: int = 0  # buckets that are encoded; as many as have arrived have come to the status
    settled: int = 0  # buckets with which nothing can go wrong on this rank alone any more
    left_ns: int = 0  # when the status did
    ended_ns: int = 0  # when the status had come
    known: threading.Event = field(default_factory=threading.Event)  # the status, or that it has failed
    ended: threading.Event = field(default_factory=threading.Event)  # all is committed or discarded, or has failed
    error: BaseException | None = None
