"""Without a codec a bucket is one all-reduce, and a pass one status more. Nothing is kept from pass to pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import monotonic_ns

import torch

from syncline.collectives.execute import Op
from syncline.core.status import OwnStatus, PassStatus
from syncline.fabric.base import Fabric
from syncline.fabric.handle import Handle
from syncline.path.path import Path, StatusWork
from syncline.path.work import BucketWork, GradientBucket, PassWork, Stamp
from syncline.tracing.spans import Recorder

DIVIDED_EARLY = (torch.float32, torch.float64)  # sums of others are divided when they are whole


@dataclass(eq=False)
class PlainPass(PassWork):
    """Buckets and status as calls of a channel."""

    handles: list[Handle] = field(default_factory=list)
    status_work: StatusWork | None = None
    left_ns: int = 0  # when the status did


class PlainPath(Path):
    """Sends buckets as they are."""

    def __init__(self, fabric: Fabric, collective: str, recorder: Recorder) -> None:
        super().__init__(fabric, collective, recorder)
        self.channel = fabric.channel()

    def divisor_of(self, dtype: torch.dtype) -> int:
        return self.fabric.world if self.collective == "engine" and dtype in DIVIDED_EARLY else 1

    def begin(self, number: int, has_data: bool = True) -> PlainPass:
        return PlainPass(number, has_data)

    def start(self, current: PassWork, bucket: GradientBucket) -> None:
        assert isinstance(current, PlainPass)
        work = BucketWork(bucket, bucket.buffer, sent_bytes=bucket.nbytes)
        op: Op = "mean" if bucket.divisor == 1 else "sum"
        current.handles.append(self.channel.all_reduce(bucket.buffer.values, op, self.collective))
        current.add(work)

    def end(self, current: PassWork, own: OwnStatus) -> None:
        assert isinstance(current, PlainPass)
        current.own = own
        own.nonfinite |= {work.number for work in current.works if work.bucket.divisor != 1 and not work.bucket.finite}
        current.left_ns = monotonic_ns()
        current.status_work = StatusWork(self.channel, current, own, self.readiness)

    def wait_for_status(self, current: PassWork) -> PassStatus:
        assert isinstance(current, PlainPass)
        assert current.status_work is not None
        return current.status_work.wait()

    def wait(self, current: PassWork) -> PassStatus:
        """Wait for the buckets in their order, then for the status, without which none of them is used."""
        assert isinstance(current, PlainPass)
        if current.is_complete:
            return self.wait_for_status(current)
        waits = []
        for handle in current.handles:
            from_ns = monotonic_ns()
            handle.wait()
            waits.append((from_ns, monotonic_ns()))
            current.arrived = len(waits)
        from_ns = monotonic_ns()
        status = self.wait_for_status(current)
        ended_ns = monotonic_ns()
        self.recorder.waited(from_ns, ended_ns)
        for index, (handle, waited) in enumerate(zip(current.handles, waits, strict=True)):
            work = current.works[index]
            times = self.met(current, index, handle.times(), ended_ns)
            self.note_span(work, times, *waited)
            work.stamps.append(Stamp("wire", times.began_ns, times.ended_ns))
            work.stamps.append(Stamp("status", current.left_ns, ended_ns))
            work.buffer.finite = self.is_finite(work, handle, status)
        current.status = status = replace(status, nonfinite=())  # the means tell by themselves
        current.is_complete = True
        return status

    def count_good(self, current: PassWork) -> None:
        self.good_passes += 1

    def is_finite(self, work: BucketWork, handle: Handle, status: PassStatus) -> bool | None:
        """Whether the means of a bucket are finite, as far as that has come out.

        Shares that are finite on all ranks have a finite sum, because each was divided before.
        """
        if work.bucket.divisor == 1:
            return handle.finite()
        return True if work.number not in status.nonfinite else None
