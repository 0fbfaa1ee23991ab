"""What steps cost, from their spans: compute, communication that was hidden behind it, and what was not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from syncline.tracing.spans import StepSpan
from syncline.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Totals:
    """Of one step, or the means over several. Exposed and compute add up to the step."""

    steps: int
    step_s: float
    compute_s: float  # everything but waiting for communication
    exposed_s: float  # the rank had nothing to do but wait
    hidden_s: float  # communication while the rank computed
    waiting_s: float  # of all communication: until the last rank had arrived
    nbytes: int  # of gradients, before any codec
    sent_bytes: int  # what a rank had to say about them
    skipped: int
    encode_s: float = 0.0  # of codecs, whether hidden or not
    decode_s: float = 0.0
    guard_s: float = 0.0  # the divergence guard, without whole comparisons

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a part of the step."""
        return self.exposed_s / self.step_s if self.step_s else 0.0

    @property
    def guard_share(self) -> float:
        """The divergence guard as a part of the step."""
        return self.guard_s / self.step_s if self.step_s else 0.0

    def __str__(self) -> str:
        return (
            f"{format_seconds(self.step_s)} a step over {self.steps} steps: compute {format_seconds(self.compute_s)}, "
            f"exposed communication {format_seconds(self.exposed_s)} ({100 * self.exposed_share:.1f} %), "
            f"hidden {format_seconds(self.hidden_s)}, of both waiting for others {format_seconds(self.waiting_s)}; "
            f"{format_bytes(self.nbytes)} of gradients as {format_bytes(self.sent_bytes)}; "
            f"{self.skipped} steps skipped{self.coding()}{self.guarding()}"
        )

    def guarding(self) -> str:
        """What the divergence guard took, if there was one."""
        return f"; guard {format_seconds(self.guard_s)} ({100 * self.guard_share:.2f} %)" if self.guard_s else ""

    def coding(self) -> str:
        """What codecs took, if there were any."""
        if not self.encode_s:
            return ""
        return f"; encoding {format_seconds(self.encode_s)}, decoding {format_seconds(self.decode_s)}"


def totals_of(step: StepSpan) -> Totals:
    """Of one step."""
    step_ns = step.ended_ns - step.began_ns
    exposed_ns = sum(span.waited_to_ns - span.waited_from_ns for span in step.buckets)
    busy_ns = sum(span.ended_ns - span.began_ns for span in step.buckets)
    waiting_ns = sum(span.met_ns - span.began_ns for span in step.buckets)
    return Totals(
        steps=1,
        step_s=step_ns / 1e9,
        compute_s=(step_ns - exposed_ns) / 1e9,
        exposed_s=exposed_ns / 1e9,
        hidden_s=max(busy_ns - exposed_ns, 0) / 1e9,
        waiting_s=waiting_ns / 1e9,
        nbytes=sum(span.nbytes for span in step.buckets),
        sent_bytes=sum(span.sent_bytes for span in step.buckets),
        skipped=int(step.skipped),
        encode_s=step.encode_ns / 1e9,
        decode_s=step.decode_ns / 1e9,
        guard_s=step.guard_ns / 1e9,
    )


def mean_totals(steps: Sequence[StepSpan]) -> Totals:
    """The means over steps; zeros where there are none."""
    each = [totals_of(step) for step in steps]
    if not each:
        return Totals(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)
    return Totals(
        steps=len(each),
        step_s=mean(one.step_s for one in each),
        compute_s=mean(one.compute_s for one in each),
        exposed_s=mean(one.exposed_s for one in each),
        hidden_s=mean(one.hidden_s for one in each),
        waiting_s=mean(one.waiting_s for one in each),
        nbytes=round(mean(one.nbytes for one in each)),
        sent_bytes=round(mean(one.sent_bytes for one in each)),
        skipped=sum(one.skipped for one in each),
        encode_s=mean(one.encode_s for one in each),
        decode_s=mean(one.decode_s for one in each),
        guard_s=mean(one.guard_s for one in each),
    )
