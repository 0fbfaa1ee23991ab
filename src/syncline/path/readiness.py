"""When every rank was ready for a bucket, as ranks tell each other in the status of a pass.

An engine does not say when the last rank has come to a call. So each says when its first and its last bucket was full,
in microseconds since a moment that all ranks share: the end of the status of two passes before, which has come on every
rank also where the status of one pass before is still under way. Buckets between these two are taken to follow evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.core.status import PassStatus
from syncline.fabric.handle import Times

UNKNOWN = (0, 0)
LATEST_US = (1 << 31) - 1  # what a word of a status holds
PASSES_BEFORE = 2


class Readiness:
    """The moments that ranks share, on the clock of this one."""

    def __init__(self) -> None:
        self.shared_ns: dict[int, int] = {}  # by number of the pass that they serve

    def status_ended(self, number: int, ended_ns: int) -> None:
        """The status of a pass has come, on all ranks at about the same time."""
        self.shared_ns = {one: ns for one, ns in self.shared_ns.items() if one >= number}
        self.shared_ns[number + PASSES_BEFORE] = ended_ns

    def own(self, number: int, ready_ns: Sequence[int]) -> tuple[int, int]:
        """What this rank has to say of its first and last bucket."""
        shared_ns = self.shared_ns.get(number)
        if shared_ns is None or not ready_ns:
            return UNKNOWN
        first, last = ((moment - shared_ns) // 1000 for moment in (ready_ns[0], ready_ns[-1]))
        return min(max(first, 1), LATEST_US), min(max(last, 1), LATEST_US)

    def met_ns(self, status: PassStatus, number: int, place: float) -> int | None:
        """When the last rank was ready for the bucket at this place, from 0 for the first to 1 for the last."""
        shared_ns = self.shared_ns.get(number)
        if shared_ns is None or UNKNOWN in status.ready_us:
            return None
        return shared_ns + int(1000 * max(first + place * (last - first) for first, last in status.ready_us))


def met_by(times: Times, met_ns: int | None, all_ended_ns: int) -> Times:
    """Times of a collective that does not know itself when all ranks had come: by all that is known, before its end."""
    if times.met_ns > times.began_ns:
        return times
    met_ns = all_ended_ns if met_ns is None else met_ns
    return Times(times.began_ns, min(max(times.began_ns, met_ns), times.ended_ns), times.ended_ns)
