"""The path of buckets: from the last gradient of each to the mean over ranks, with one status for all of a pass.

begin ──> start (a full bucket) ... start ──> end (the status leaves) ──> wait: all have arrived, and may be used or not
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import monotonic_ns
from typing import Literal

import torch
from torch import Tensor

from syncline.core.status import OwnStatus, PassStatus, read_status, write_status
from syncline.fabric.base import Fabric
from syncline.fabric.channel import Channel
from syncline.fabric.handle import Times
from syncline.guards.finite import sum_fits
from syncline.path.codec_state import Saved
from syncline.path.readiness import Readiness, met_by
from syncline.path.work import BucketWork, GradientBucket, PassWork
from syncline.tracing.spans import BucketSpan, Recorder

DivideBy = Literal["world", "active"]  # ranks: all, or those that still have data


class StatusWork:
    """The status of a pass on its way: one small sum."""

    def __init__(self, channel: Channel, current: PassWork, own: OwnStatus, readiness: Readiness) -> None:
        own.ready_us = readiness.own(current.number, [work.ready_ns for work in current.works])
        words = write_status(own, current.bucket_numbers, channel.rank, channel.world)
        self.current = current
        self.readiness = readiness
        self.world = channel.world
        self.words = torch.tensor(words, dtype=torch.int32, device=channel.device)
        self.handle = channel.all_reduce(self.words, "sum", "engine" if channel.transport.has_engine else "auto")

    def wait(self) -> PassStatus:
        """The status, when it has arrived."""
        self.handle.wait()
        if self.current.status is None:
            self.current.status = read_status(self.words.tolist(), self.current.bucket_numbers, self.world)
            self.readiness.status_ended(self.current.number, self.handle.times().ended_ns)
        return self.current.status


class Path(ABC):
    """Starts buckets in order, and waits for a pass."""

    waits_for_ranks = True  # that produce the same bucket
    has_residuals = False  # or other state that is committed when a pass is good
    good_passes = 0  # that all ranks could use: what codecs draw and count follows these, not all passes
    joined: DivideBy | None = None  # some ranks may have no data: by how many of them what comes is divided

    def __init__(self, fabric: Fabric, collective: str, recorder: Recorder) -> None:
        self.fabric = fabric
        self.collective = collective
        self.recorder = recorder
        self.readiness = Readiness()

    def divisor_of(self, dtype: torch.dtype) -> int:
        """By which gradients are divided on their way into a bucket, because an engine only adds."""
        return 1

    def takes(self, values: Tensor) -> bool:
        """Whether what this rank has to say is finite, and stays so when it is added up."""
        return sum_fits(values, self.fabric.world)

    def begin(self, number: int, has_data: bool = True) -> PassWork:
        """A pass, of which no bucket has left yet."""
        return PassWork(number, has_data)

    @abstractmethod
    def start(self, current: PassWork, bucket: GradientBucket) -> None:
        """Send a bucket off, maybe without data. Its memory is the fabric's until the pass has ended."""

    @abstractmethod
    def end(self, current: PassWork, own: OwnStatus) -> None:
        """All buckets of this rank have left: let its status follow."""

    @abstractmethod
    def wait_for_status(self, current: PassWork) -> PassStatus:
        """Wait until all ranks have ended the pass."""

    @abstractmethod
    def wait(self, current: PassWork) -> PassStatus:
        """Wait until all buckets have arrived, and what is kept of them is committed or discarded."""

    def first_missing(self, current: PassWork) -> int:
        """Number of the first bucket that has not arrived."""
        numbers = current.bucket_numbers
        return numbers[min(current.arrived, len(numbers) - 1)] if numbers else 0

    def count_good(self, current: PassWork) -> None:
        """All ranks use this pass. Paths that commit residuals have counted it then."""

    def grads_assigned(self, current: PassWork) -> None:
        """The means of these buckets are where they are used from now on."""
        now_ns = monotonic_ns()
        for work in current.works:
            assert work.span is not None
            work.span.applied_ns = now_ns

    def met(self, current: PassWork, index: int, times: Times, all_ended_ns: int) -> Times:
        """Times of a bucket's collective, with when all ranks had come to it as well as that is known."""
        assert current.status is not None
        place = index / max(1, len(current.works) - 1)
        return met_by(times, self.readiness.met_ns(current.status, current.number, place), all_ended_ns)

    def note_span(self, work: BucketWork, times: Times, waited_from_ns: int, waited_to_ns: int) -> None:
        """Record that a bucket has arrived."""
        work.span = BucketSpan(
            work.number, work.bucket.nbytes, work.sent_bytes, work.ready_ns, *times, waited_from_ns, waited_to_ns
        )
        self.recorder.buckets.append(work.span)

    def state_dict(self) -> Saved:
        """What is kept from pass to pass, by parameter."""
        return {}

    def load_state_dict(self, saved: Saved) -> None:
        """Go on from what was saved."""

    def close(self) -> None:
        """Let threads end."""
