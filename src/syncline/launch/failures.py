"""When ranks fail: who failed first, and what to tell the user."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from syncline.errors import FabricError, RankFailed, SynclineError


class ProcessEnded(SynclineError):
    """A rank's process ended without a word."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(rank, exit_code)
        self.rank = rank
        self.exit_code = exit_code

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"the process of rank {self.rank} was ended by {signal.Signals(-self.exit_code).name}"
        return f"the process of rank {self.rank} exited with code {self.exit_code} before it had a result"


class ProcessStopped(SynclineError):
    """A rank's process was stopped by a signal, and the others have ended without it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank

    def __str__(self) -> str:
        return f"the process of rank {self.rank} was stopped, as SIGSTOP does, and did not go on; it was killed"


@dataclass(frozen=True)
class Failure:
    """One rank's failure."""

    rank: int
    error: BaseException
    traceback: str
    order: int  # of being noticed


def last_of(failure: Failure, earlier: list[Failure]) -> Failure:
    """The last failure of a rank, which says what had ended its processes before."""
    lines = [f"  {type(one.error).__name__}: {one.error}" for one in earlier]
    before = "".join(["\n\nbefore that, in the same rank:\n", "\n".join(lines)]) if lines else ""
    return replace(failure, traceback=failure.traceback.rstrip() + before)


def rank_failed(failures: list[Failure], results: Mapping[int, object]) -> RankFailed:
    """The error for all failures; those that only suffered from another rank's come last."""
    failures = sorted(failures, key=lambda failure: (isinstance(failure.error, FabricError), failure.order))
    first, others = failures[0], failures[1:]
    lines = [f"rank {first.rank} failed first:", "", first.traceback.rstrip()]
    if others:
        lines += ["", "after that:"]
    lines += [f"  rank {f.rank}: {type(f.error).__name__}: {f.error}" for f in others]
    return RankFailed("\n".join(lines), {f.rank: f.error for f in failures}, results)
