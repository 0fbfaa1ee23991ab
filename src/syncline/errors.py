"""Everything Syncline raises, split by what the caller can do about it.

SynclineError
  ConfigError          the request is impossible; nothing was sent
    UnknownName        a name that is not in the table; the nearest ones are offered
    PairingError       two settings that do not go together
    LayoutMismatch     ranks have different models or settings; the difference is shown
  FabricError          a peer or a link failed; the step was discarded
    PeerLost           a rank died or left
    PeerStalled        a rank is alive as far as we know, but did not arrive before the deadline
    PeerAborted        a rank gave up for a reason of its own: it was interrupted, or closed the fabric
    Desync             ranks did different things; nothing was sent, or what was sent was not used
    CorruptMessage     what a codec received is not what a codec sends; nothing was written
    JoinFailed         the ranks could not form a group
    FabricClosed       the fabric was closed, or belongs to the process that this one was forked from
  NonFiniteGradient    too many steps in a row had to be skipped, or parameters are not finite; says what to go on from
  ReplicasDiverged     replicas that should be equal are not; the first tensor that differs is named
  LateGradient         a gradient came after its bucket had left; the step was given up on all ranks
  OutOfSharedMemory    there is no memory for a shared buffer; nothing else changed
  ScheduleError        a collective's schedule breaks one of its invariants
  RankFailed           `run` was asked to run a function and it failed on some rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class SynclineError(Exception):
    """The root of every error raised on purpose by this package."""


class ConfigError(SynclineError, ValueError):
    """The request is impossible; nothing was sent."""


class UnknownName(ConfigError):
    """A name that is not in the table."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")
        self.near = near
        self.told = (kind, name, names)

    def __reduce__(self) -> tuple[type[UnknownName], tuple[str, str, list[str]]]:
        return UnknownName, self.told


class PairingError(ConfigError):
    """Two settings that do not go together."""


class LayoutMismatch(ConfigError):
    """Ranks have different models or settings."""


class NonFiniteGradient(SynclineError):
    """Too many steps in a row had to be skipped, or parameters are not finite themselves."""


class ReplicasDiverged(SynclineError):
    """Replicas that should be equal are not."""


class LateGradient(SynclineError):
    """A gradient came after its bucket had left."""


class FabricError(SynclineError):
    """A peer or a link failed; what was being computed has been discarded."""


class PeerError(FabricError):
    """A failure that is one rank's."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, message)
        self.rank = rank
        self.message = message

    def __str__(self) -> str:
        return self.message


class PeerLost(PeerError):
    """A rank died or left."""


class PeerStalled(PeerError):
    """A rank did not arrive before the deadline."""


class PeerAborted(PeerError):
    """A rank gave up for a reason of its own."""


class Desync(FabricError):
    """Ranks did different things."""


class CorruptMessage(FabricError):
    """What a codec received is not what a codec sends."""


class JoinFailed(FabricError):
    """The ranks could not form a group."""


class FabricClosed(FabricError):
    """The fabric was closed, or belongs to another process."""


class OutOfSharedMemory(SynclineError, MemoryError):
    """There is no memory for a shared buffer."""


class ScheduleError(SynclineError):
    """A collective's schedule breaks one of its invariants."""


class RankFailed(SynclineError):
    """A function given to `run` failed. The rank that failed first comes first.

    `failures` maps each failed rank to its exception (or to a description of how its process ended), in
    the order in which they are to be blamed; `results` holds what the ranks that succeeded returned.
    """

    def __init__(self, message: str, failures: Mapping[int, BaseException], results: Mapping[int, object]) -> None:
        super().__init__(message)
        self.failures = dict(failures)
        self.results = dict(results)

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, dict[int, BaseException], dict[int, object]]]:
        return RankFailed, (str(self), self.failures, self.results)
