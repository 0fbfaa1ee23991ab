"""Everything that can be chosen for a `Sync`; all ranks choose the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from syncline.codecs.codec import Codec
from syncline.codecs.registry import text_of_codec
from syncline.collectives.hierarchical import Hierarchical
from syncline.collectives.registry import algorithm
from syncline.core.plan import Plan
from syncline.errors import ConfigError, PairingError, UnknownName
from syncline.guards.finite import POLICIES, Policy
from syncline.specs import text_of

if TYPE_CHECKING:
    from syncline.modes.mode import Mode

Buffers = Literal["broadcast", "average", "local"]
BUFFERS: tuple[Buffers, ...] = ("broadcast", "average", "local")
LEAST = {"bucket_bytes": 1, "first_bucket_bytes": 1, "accumulate": 1, "check_every": 0, "most_skips": 0, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked at birth."""

    mode: Mode  # when replicas talk
    codec: Codec  # how much is said
    collective: str  # who sends what to whom
    bucket_bytes: int  # larger has fewer messages, smaller starts earlier
    first_bucket_bytes: int  # small, so that communication starts early
    accumulate: int  # backward passes per optimizer step; gradients add up, as they do in torch
    buffers: Buffers  # of modules, such as BatchNorm's statistics
    nonfinite: Policy  # what to do about NaN and infinity: skip the step, raise, or ignore
    most_skips: int  # in a row, before it is an error
    check_every: int  # compare replicas bit by bit every so many steps; 0 is never
    seed: int  # of what codecs draw at random
    lean: bool = False  # with a codec: one residual instead of two, and buckets are decoded after the last has arrived
    divergence_guard: bool = True  # compare hyperparameters and a part of the state in every pass, and all if in doubt

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if type(value) is not int:
                raise ConfigError(f"{name}={value!r} is not a whole number")
            if value < least:
                raise ConfigError(f"{name}={value} is less than {least}")
        for name in ("divergence_guard", "lean"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name}={getattr(self, name)!r} is neither True nor False")
        if self.buffers not in BUFFERS:
            raise UnknownName("buffers", self.buffers, BUFFERS)
        if self.nonfinite not in POLICIES:
            raise UnknownName("nonfinite", self.nonfinite, POLICIES)
        if self.codec.correction is not None and self.codec.correction.masking and self.is_between_hosts:
            raise PairingError(
                f"{self.codec.name} takes the momentum from entries that are sent, and with collective="
                f"{self.collective} only the first rank of a host knows which; use masking=false"
            )

    def plan(self) -> Plan:
        """The plan before the first pass, which only observes."""
        return Plan(
            mode=text_of(self.mode.name, self.mode),
            codec=text_of_codec(self.codec),
            collective=self.collective,
            bucket_bytes=self.bucket_bytes,
            first_bucket_bytes=self.first_bucket_bytes,
        )

    @property
    def least_world(self) -> int:
        """Ranks from which on there is anything to do: gradients are corrected also where nobody averages them."""
        return self.mode.least_world if self.codec.correction is None else 1

    @property
    def is_between_hosts(self) -> bool:
        """Whether a codec talks between hosts only."""
        return self.collective not in ("auto", "engine") and isinstance(algorithm(self.collective), Hierarchical)
