"""Spans at the seams of the pipeline, in nanoseconds of `time.monotonic_ns`.

ready             began        met               ended          waited_from      waited_to        applied
last gradient     its turn     all ranks have    all is said    the rank has     and goes on      means are what the
was there         has come     arrived           about it       nothing else                      optimizer will find
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class BucketSpan:
    """One bucket in one pass."""

    bucket: int  # -1 where ranks waited for each other without one
    nbytes: int  # of the gradients
    sent_bytes: int  # what this rank had to say about them
    ready_ns: int
    began_ns: int
    met_ns: int
    ended_ns: int
    waited_from_ns: int
    waited_to_ns: int
    applied_ns: int = 0  # or they are in the parameters, or servers have used them; 0: a pass that nobody could use


class StepSpan(NamedTuple):
    """From the end of one optimizer step to the end of the next."""

    began_ns: int
    ended_ns: int
    skipped: bool
    buckets: tuple[BucketSpan, ...]
    encode_ns: int = 0  # of codecs, without waiting for answers
    decode_ns: int = 0
    guard_ns: int = 0  # of the divergence guard, without whole comparisons


class Recorder:
    """Keeps the spans of the last steps."""

    def __init__(self, steps: int = 1000) -> None:
        self.steps: deque[StepSpan] = deque(maxlen=steps)
        self.buckets: list[BucketSpan] = []
        self.codings: list[tuple[int, int]] = []  # of buckets: how long encoding and decoding took
        self.guard_ns = 0  # that the divergence guard took in this step
        self.began_ns = 0

    def begin(self, now_ns: int) -> None:
        """The first step begins."""
        self.began_ns = now_ns

    def waited(self, from_ns: int, to_ns: int) -> None:
        """For the other ranks, with no bucket under way."""
        self.buckets.append(BucketSpan(-1, 0, 0, from_ns, from_ns, to_ns, to_ns, from_ns, to_ns))

    def end_step(self, now_ns: int, skipped: bool) -> None:
        """A step is over, and the next one begins."""
        codings, self.codings = self.codings, []
        encode_ns, decode_ns = sum(one for one, _ in codings), sum(other for _, other in codings)
        buckets = tuple(self.buckets)
        self.steps.append(StepSpan(self.began_ns, now_ns, skipped, buckets, encode_ns, decode_ns, self.guard_ns))
        self.buckets.clear()
        self.guard_ns = 0
        self.began_ns = now_ns
