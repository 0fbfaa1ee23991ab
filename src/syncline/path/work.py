"""What is under way: a bucket of a pass, and a pass with all its buckets and its status. Seams leave stamps."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Literal, NamedTuple

from syncline.core.status import OwnStatus, PassStatus
from syncline.path.bucket import Bucket, BucketBuffer
from syncline.tracing.spans import BucketSpan

StageName = Literal["host", "encode", "wire", "combine", "decode", "commit"]


class Stamp(NamedTuple):
    """When a bucket was in a stage, in nanoseconds of `time.monotonic_ns`."""

    stage: StageName
    began_ns: int
    ended_ns: int


@dataclass(eq=False)
class BucketWork:
    """A bucket on its way."""

    bucket: Bucket
    buffer: BucketBuffer
    ready_ns: int = field(default_factory=monotonic_ns)
    sent_bytes: int = 0  # that this rank sends
    stamps: list[Stamp] = field(default_factory=list)
    span: BucketSpan | None = None  # when it has arrived

    @property
    def number(self) -> int:
        """Number of the bucket."""
        return self.bucket.number


@dataclass(eq=False)
class PassWork:
    """The buckets of a pass on their way, and what this rank has to say of it."""

    number: int
    has_data: bool
    works: list[BucketWork] = field(default_factory=list)
    own: OwnStatus | None = None  # when all buckets of this rank have left
    status: PassStatus | None = None  # when all ranks' is known
    arrived: int = 0  # buckets
    is_complete: bool = False  # all buckets have arrived, and what is kept of them is committed or discarded

    @property
    def bucket_numbers(self) -> list[int]:
        """Numbers of its buckets, in the order in which they left."""
        return [work.number for work in self.works]

    def unused_names(self) -> set[str]:
        """Parameters that no rank had a gradient of: they are given none, so their residuals stay."""
        assert self.status is not None
        if not self.status.unused:
            return set()
        slots = [slot for work in self.works for slot in work.bucket.slots]
        return {slots[position].name for position in self.status.unused}
