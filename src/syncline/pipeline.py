"""The path of a bucket: from its last gradient to the mean over ranks. Every seam leaves a span."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic_ns

from syncline.buckets.bucket import Bucket
from syncline.fabric.base import Fabric, Handle
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

    def start(self, number: int, bucket: Bucket) -> Flight:
        """Send a bucket off. Its memory belongs to the fabric until it is waited for."""
        ready_ns = monotonic_ns()
        handle = self.fabric.all_reduce_async(bucket.flat, op="mean", collective=self.collective)
        return Flight(number, bucket, handle, ready_ns)

    def wait(self, flight: Flight) -> None:
        """Until the bucket holds the mean."""
        waited_from_ns = monotonic_ns()
        flight.handle.wait()
        waited_to_ns = monotonic_ns()
        times = flight.handle.times()
        self.recorder.buckets.append(
            BucketSpan(flight.number, flight.bucket.nbytes, flight.ready_ns, *times, waited_from_ns, waited_to_ns)
        )
