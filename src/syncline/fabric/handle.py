"""What a collective returns that only starts: a handle to wait on, with the times of what happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Times(NamedTuple):
    """When a call happened, in nanoseconds of `time.monotonic_ns`."""

    began_ns: int
    met_ns: int  # all ranks had arrived
    ended_ns: int


class Ended(NamedTuple):
    """What is known of a call that went well."""

    times: Times
    finite: bool | None = None


class Handle(Protocol):
    """A collective that was started and may still be under way."""

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when it is done; raise what it raised, or `FabricError` when it takes longer than the deadline."""

    def done(self) -> bool:
        """Whether it is over, one way or another."""

    def times(self) -> Times:
        """When it happened; meaningful once it is done."""

    def finite(self) -> bool | None:
        """Whether no element of the result is infinite or NaN, the same on every rank; None where that is not known."""

    def on_done(self, call: Callable[[], None]) -> None:
        """Have something called when it is over, one way or another, in whichever thread; at once if it is."""

    def lends_thread(self) -> bool:
        """Whether who is called by `on_done` may go on with the outcome there; all other calls can do without it."""


def not_done_message(call: str, waited_s: float, operation_s: float) -> str:
    """What a wait says that is shorter than the call's own deadline."""
    return f"{call} is not done after {waited_s} s; it goes on, and fails by itself when a rank is {operation_s} s late"
