"""How long to wait, in one readable object: `Deadlines(5.0)`, `Deadlines(5.0, join=60.0)`."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.errors import ConfigError


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a wait becomes an error that names who did not come."""

    operation: float = 300.0  # one collective or message; longer tolerates slower ranks, shorter notices sooner
    join: float = 120.0  # meeting at the start, when processes are still being born

    def __post_init__(self) -> None:
        for name, seconds in (("operation", self.operation), ("join", self.join)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds} s is not a positive time; try {name}=60.0")
