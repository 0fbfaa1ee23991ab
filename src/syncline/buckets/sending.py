"""How buckets leave: as soon as they are full, in the agreed order, and what is left when backward ends."""

from __future__ import annotations

from collections.abc import Callable

from syncline.buckets.bucket import Bucket, Slot
from syncline.buckets.layout import Layout
from syncline.buckets.passes import Pass, write_verdict
from syncline.errors import LateGradient
from syncline.fabric.base import Fabric
from syncline.guards.fingerprint import NO_FINGERPRINT, Fingerprint
from syncline.guards.finite import first_not_finite
from syncline.guards.hangs import Doing
from syncline.pipeline import Pipeline


class Sender:
    """Sends the buckets of a layout, once there are any, and lets the others see how far it is."""

    def __init__(
        self, fabric: Fabric, pipeline: Pipeline, layout: Layout, fingerprint: Callable[[int], Fingerprint]
    ) -> None:
        self.fabric = fabric
        self.pipeline = pipeline
        self.layout = layout
        self.fingerprint = fingerprint  # of this replica, in the pass of a number

    def gradient_came(self, slot: Slot, current: Pass) -> None:
        """Put it in its bucket, which leaves with its last gradient."""
        if slot.fired > slot.expected:
            self.came_again(slot, current)
        elif slot.fired == slot.expected and not slot.is_sparse:
            if not slot.is_small:
                slot.place()
            slot.bucket.missing -= 1
            if not slot.bucket.missing:
                self.send_full(current)

    def came_again(self, slot: Slot, current: Pass) -> None:
        """More gradients than in the first pass; too late if the bucket has left, because it would be torn."""
        if slot.is_sparse or (slot.bucket.number >= current.next_bucket and not slot.is_divided):
            slot.expected = slot.fired
            return
        raise LateGradient(
            f"{slot.name} received gradient {slot.fired} of this pass after it had left or was ready to; in the first "
            f"pass that had any there were {slot.expected}. Its graph changes from step to step, and parts of it have "
            f"backward passes of their own: use checkpoint(..., use_reentrant=False), or wrap it in sync.no_sync()"
        )

    def send_full(self, current: Pass) -> None:
        """In the agreed order, as far as they are full."""
        buckets = self.layout.buckets
        while current.next_bucket < len(buckets):
            bucket = buckets[current.next_bucket]
            if bucket.missing or bucket is self.layout.judged:  # the verdict is not known before the end of the pass
                return
            bucket.place_small()
            bucket.side.flags.fill_(1)
            self.send(bucket, current)

    def send_from(self, first: int, current: Pass) -> None:
        """All from this one on, with zeros for gradients that did not come."""
        for bucket in self.layout.buckets[first:]:
            if current.takes_part:
                bucket.learn()
                bucket.fill()
            else:
                bucket.side.flat.zero_()
            self.send(bucket, current)

    def send(self, bucket: Bucket, current: Pass) -> None:
        """The next one leaves."""
        bucket.side.bad.fill_(not bucket.finite)
        bucket.side.finite = None
        if bucket is self.layout.judged:
            current.unfrozen = self.layout.unfrozen()
            failed = current.failed or current.is_tainted
            if self.pipeline.keeps and not self.sparse_are_finite(current):
                bucket.side.bad.fill_(1)  # what a codec keeps is kept before sparse gradients are averaged
            told = self.fingerprint(current.number) if current.takes_part else NO_FINGERPRINT
            write_verdict(bucket, self.fabric.rank, failed, current.turn, current.late, bool(current.unfrozen), told)
        current.flights.append(self.pipeline.start(current.number, bucket, current.has_data))
        current.next_bucket += 1
        current.produced += not current.failed
        self.tell(current, Doing.FAILED if current.failed else Doing.BACKWARD)

    def sparse_are_finite(self, current: Pass) -> bool:
        """Whether this rank's are."""
        named = [(slot.name, slot.parameter.grad) for slot in self.layout.sparse if slot.parameter.grad is not None]
        return not current.takes_part or not first_not_finite(named)

    def tell(self, current: Pass, doing: Doing) -> None:
        """How far this rank is, for those who may have to explain why they wait."""
        self.fabric.write_note((current.number, current.next_bucket, current.produced, doing))
