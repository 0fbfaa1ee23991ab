"""What became of a call. Light: ranks import it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from syncline.errors import ConfigError, FabricError, PeerError


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank."""

    kind: str
    culprit: int | None
    message: str
    seconds: float


def outcome_of(call: Callable[[], object]) -> Outcome:
    """Call, and say what came of it."""
    started = time.monotonic()
    try:
        call()
    except (FabricError, ConfigError) as error:
        culprit = error.rank if isinstance(error, PeerError) else None
        return Outcome(type(error).__name__, culprit, str(error), time.monotonic() - started)
    return Outcome("nothing", None, "", time.monotonic() - started)
