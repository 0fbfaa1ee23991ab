"""One backward pass that ends with synchronized gradients, and what all ranks know at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from syncline.buckets.bucket import COMMON_WORDS, FLAGS, Bucket, Slot
from syncline.buckets.turns import NO_DATA, ranks_by_turn
from syncline.fabric.base import Handle
from syncline.guards.fingerprint import DIGEST_BITS, NO_FINGERPRINT, Fingerprint
from syncline.pipeline import Flight


@dataclass(frozen=True)
class Verdict:
    """What all ranks know at the end of a pass."""

    failed: bool  # a rank failed in its backward pass, so the gradients mean nothing
    bad: tuple[int, ...]  # buckets that a codec could not take on some rank: not finite, or too large
    active: tuple[int, ...]  # ranks that took part with data
    turns: tuple[int, ...] = ()  # of each rank: how many passes it has made since its last step, with this one
    late: bool = False  # a rank came to it only in its step, when others may have changed their gradients already
    thawed: bool = False  # a rank has unfrozen parameters
    touched: bool = False  # a rank has changed its replica outside the optimizer's step
    differs: bool = False  # ranks have different fingerprints

    @property
    def is_good(self) -> bool:
        """Whether there are gradients, and they can be used."""
        return bool(self.active) and not self.failed and not self.bad and len(ranks_by_turn(self.turns)) < 2


@dataclass
class Pass:
    """One backward pass of this rank, as far as it has come."""

    number: int
    synchronizes: bool  # whether gradients are sent in it
    turn: int = 1  # how many passes this rank has made since its last step, NO_DATA if it only keeps company, or UNSURE
    late: bool = False  # made by the optimizer's step, because there was no backward pass, or none that synchronizes
    is_tainted: bool = False  # by a backward pass before it that failed and is part of the same step
    failed: bool = False  # an exception ended it, so nobody may use it
    unfrozen: list[str] = field(default_factory=list)  # parameters that have no bucket yet, when the verdict left
    has_agreed: bool = False  # with the others, on what is unfrozen
    autograd_pass: int = -1  # the engine's number, which changes in nested ones
    next_bucket: int = 0
    produced: int = 0  # buckets that left with what they are for, and not only with zeros because it failed
    flights: list[Flight] = field(default_factory=list)
    order: list[Slot] = field(default_factory=list)  # in which gradients came; only of the first pass
    ending: Handle | None = None  # what a codec still has to do when all flights have arrived

    @property
    def has_data(self) -> bool:
        """False for a rank that only keeps the others company."""
        return self.turn != NO_DATA

    @property
    def takes_part(self) -> bool:
        """Whether this rank sends gradients of its own, and is given the means."""
        return self.has_data and not self.failed


@dataclass(frozen=True)
class KeptPass:
    """A pass that was under way when a checkpoint was made: its means, by parameter."""

    number: int
    verdict: Verdict
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, current: Pass, verdict: Verdict) -> Self:
        """One whose flights have arrived."""
        gradients: dict[str, Tensor] = {}
        for flight in current.flights:
            flags = flight.side.flags.tolist()
            for slot, view, flag in zip(flight.bucket.slots, flight.side.views, flags, strict=True):
                if flag > 0:
                    gradients[slot.name] = view.clone()
        return cls(current.number, verdict, gradients)

    def state_dict(self) -> dict[str, Any]:
        """Nothing but numbers and tensors."""
        return asdict(self.verdict) | {"number": self.number, "gradients": dict(self.gradients)}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Self:
        """From what was saved."""
        verdict = Verdict(saved["failed"], tuple(saved["bad"]), tuple(saved["active"]))
        gradients = {name: gradient.clone() for name, gradient in saved["gradients"].items()}
        return cls(saved["number"], verdict, gradients)


def write_verdict(
    bucket: Bucket,
    rank: int,
    failed: bool,
    turn: int,
    late: bool = False,
    thawed: bool = False,
    fingerprint: Fingerprint = NO_FINGERPRINT,
) -> None:
    """What this rank has to say, to be averaged."""
    verdict = bucket.side.verdict
    words = [0.0] * len(verdict)
    words[:FLAGS] = map(float, (failed, late, thawed, fingerprint.touched))
    words[FLAGS:COMMON_WORDS] = [(fingerprint.digest >> bit & 1) / bucket.divisor for bit in range(DIGEST_BITS)]
    words[COMMON_WORDS + rank] = turn / bucket.divisor
    verdict.copy_(torch.tensor(words, dtype=verdict.dtype))


def read_verdict(flights: Sequence[Flight]) -> Verdict:
    """The same on every rank, when all these have arrived."""
    (words,) = [flight.side.verdict.tolist() for flight in flights if len(flight.side.verdict)]
    bad = tuple(flight.number for flight in flights if flight.side.bad.item() > 0)
    failed, late, thawed, touched = (word > 0 for word in words[:FLAGS])
    of_ranks = words[COMMON_WORDS:]
    turns = tuple(round(word * len(of_ranks)) for word in of_ranks)
    active = tuple(rank for rank, turn in enumerate(turns) if turn != NO_DATA)
    differs = bits_differ(words[FLAGS:COMMON_WORDS], len(of_ranks))
    return Verdict(failed, bad, active, turns, late, thawed, touched, differs)


def bits_differ(means: Sequence[float], world: int) -> bool:
    """Whether ranks have different bits, by their means. One rank of `world` makes a difference of two of these halves.

    Means of 16 bits may be rounded to 1 where one rank of hundreds has another bit; those near 0 are exact enough.
    """
    half = 0.5 / world
    return any(half < mean < 1 - half for mean in means)
