"""What all ranks know at the end of a pass: one sum of int32 words, of a length that follows from the plan.

    counts                                 nonfinite        present            of rank 0               of rank 1 ...
    failed | late | unfrozen | touched     one a bucket     one a parameter    since step, number,
                                                                               digest, call, ready (2),
                                                                               stepped

It travels on its own, beside the buckets, so that no bucket carries anything but gradients. Every word but those of a
rank is a number of ranks. A rank writes its own words and zeros in those of the others, so that their sum is what every
rank has written.

Not only backward passes end with one: a rank that reconfigures, or lets what is under way arrive, says so in the same
words, so that ranks that do different things learn it before anything is used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from syncline.core.passes import NO_DATA, ranks_by_count
from syncline.core.ranks import some_ranks
from syncline.errors import Desync

COUNTS = 4  # words that say how many ranks have failed, were late, have unfrozen parameters, have touched their replica
OWN = 7  # words of each rank
MOST_PASSES = 1 << 20  # numbers of passes are compared modulo this


class Call(IntEnum):
    """What a rank does that ends with a status."""

    SYNCHRONIZE = 0  # gradients, or parameters where a period ends
    DRAIN = 1  # before its period ends
    RECONFIGURE = 2


DOES = {
    Call.SYNCHRONIZE: "synchronizes in its training loop",
    Call.DRAIN: "calls drain()",
    Call.RECONFIGURE: "calls reconfigure()",
}


@dataclass(frozen=True)
class PassStatus:
    """The same on every rank: whether a pass can be used, by whom it was made, and what else ranks must know of it."""

    failed: bool  # a rank failed in its backward pass, so the gradients mean nothing
    nonfinite: tuple[int, ...]  # buckets with values that are not finite on some rank, or too large for its codec
    active: tuple[int, ...]  # ranks that took part with data
    since_step: tuple[int, ...] = ()  # of each rank: how many passes it has made since its last step, with this one
    late: bool = False  # a rank came to it only in its step, when others may have changed their gradients already
    unfrozen: bool = False  # a rank has unfrozen parameters
    touched: bool = False  # a rank has changed its replica outside the optimizer's step
    differs: bool = False  # ranks have different fingerprints
    unused: frozenset[int] = frozenset()  # positions of parameters that no rank has a gradient of
    numbers: tuple[int, ...] = ()  # of each rank: the number of the pass that it is in
    calls: tuple[int, ...] = ()  # of each rank: what it does
    ready_us: tuple[tuple[int, int], ...] = ()  # of each rank: when its first and last bucket was full, as it says
    stepped: tuple[int, ...] = ()  # of each rank: a digest of what has stepped since the pass before

    def refuse_different_calls(self) -> None:
        """Raise `Desync` on every rank if they do different things, or are in different passes."""
        if len(set(self.calls)) > 1:
            ranks = {call: [rank for rank, theirs in enumerate(self.calls) if theirs == call] for call in Call}
            sides = [f"{some_ranks(who)} {DOES[call]}" for call, who in ranks.items() if who]
            raise Desync(
                f"ranks do different things, so nothing of it was used: {', while '.join(sides)}. All ranks call "
                f"drain() and reconfigure() after the same step"
            )
        if len(set(self.numbers)) > 1:
            raise Desync(
                f"ranks are in different passes, so nothing of it was used: {list(self.numbers)}, by rank. Were they "
                f"restored from checkpoints of different steps?"
            )

    def refuse_different_steps(self) -> None:
        """Raise `Desync` on every rank if other optimizers have stepped on some ranks than on others."""
        ranks: dict[int, list[int]] = {}
        for rank in self.active:
            ranks.setdefault(self.stepped[rank], []).append(rank)
        if len(ranks) > 1:
            sides = " than on ".join(map(some_ranks, ranks.values()))
            raise Desync(
                f"other optimizers stepped after the last backward pass on {sides}, so replicas are not equal any "
                f"more; make the same steps on all ranks, close this Sync and make another to begin from rank 0"
            )

    @property
    def is_good(self) -> bool:
        """Whether there are gradients, and they can be used."""
        return bool(self.active) and not self.failed and not self.nonfinite and len(ranks_by_count(self.since_step)) < 2


@dataclass
class OwnStatus:
    """What one rank has to say of a pass."""

    number: int  # of the pass
    since_step: int  # passes, with this one; or NO_DATA, or UNSURE
    failed: bool = False
    late: bool = False
    unfrozen: bool = False
    touched: bool = False
    digest: int = 0  # of this replica, or of the plan that a rank wants to adopt; 24 bits
    call: Call = Call.SYNCHRONIZE
    ready_us: tuple[int, int] = (0, 0)  # when its first and its last bucket was full (`path/readiness.py`)
    stepped: int = 0  # digest of what has stepped since the pass before; 24 bits
    nonfinite: set[int] = field(default_factory=set)  # numbers of buckets
    present: list[int] = field(default_factory=list)  # of every parameter, whether this rank has a gradient of it


def write_status(own: OwnStatus, buckets: Collection[int], rank: int, world: int) -> list[int]:
    """The words of one rank, to be added up."""
    words = [int(own.failed), int(own.late), int(own.unfrozen), int(own.touched)]
    words += [int(bucket in own.nonfinite) for bucket in buckets]
    words += own.present
    of_ranks = [0] * (OWN * world)
    mine = [own.since_step, own.number % MOST_PASSES, own.digest, own.call, *own.ready_us, own.stepped]
    of_ranks[OWN * rank : OWN * rank + OWN] = mine
    return words + of_ranks


def read_status(words: Sequence[int], buckets: Sequence[int], world: int) -> PassStatus:
    """The sum of what all ranks have written."""
    failed, late, unfrozen, touched = (word > 0 for word in words[:COUNTS])
    nonfinite = tuple(bucket for bucket, count in zip(buckets, words[COUNTS:], strict=False) if count)
    present = words[COUNTS + len(buckets) : len(words) - OWN * world]
    of_ranks = words[len(words) - OWN * world :]
    since_step = tuple(of_ranks[0::OWN])
    return PassStatus(
        failed,
        nonfinite,
        tuple(rank for rank, count in enumerate(since_step) if count != NO_DATA),
        since_step,
        late,
        unfrozen,
        touched,
        len(set(of_ranks[2::OWN])) > 1,
        frozenset(position for position, count in enumerate(present) if not count),
        tuple(of_ranks[1::OWN]),
        tuple(of_ranks[3::OWN]),
        tuple(zip(of_ranks[4::OWN], of_ranks[5::OWN], strict=True)),
        tuple(of_ranks[6::OWN]),
    )
