"""Means of parameters, or of how far they have come, over ranks: in buckets, along the same path as gradients.

A fragment is a part of the model that is exchanged as a whole. Its last bucket carries the verdict: which ranks had
something to contribute. The others, which have no data, or nothing that is finite and can be added up, send zeros and
take what comes. Where a codec cannot go on from what it has kept on some rank, nothing comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from syncline.buckets.assign import Item, assign
from syncline.buckets.bucket import Bucket, Slot
from syncline.buckets.parameters import Named
from syncline.buckets.passes import read_verdict, write_verdict
from syncline.codecs.feedback import Units
from syncline.fabric.base import Handle
from syncline.guards.fingerprint import NO_FINGERPRINT, Fingerprint
from syncline.modes.replica import Replica
from syncline.pipeline import Flight

Fill = Callable[[Slot], None]  # writes what a rank contributes to `slot.view`


@dataclass
class Fragment:
    """A part of the model, and its buckets."""

    buckets: list[Bucket]
    flights: list[Flight] = field(default_factory=list)
    ending: Handle | None = None
    is_sound: bool = False  # when it left, this rank's part of it was finite and could be added up

    @property
    def slots(self) -> list[Slot]:
        """Its parameters."""
        return [slot for bucket in self.buckets for slot in bucket.slots]


@dataclass(frozen=True)
class Heard:
    """What ranks have said about a fragment."""

    active: tuple[int, ...]  # ranks that had something to say
    contributed: bool  # this rank had
    bad: tuple[str, ...]  # parameters, of which one is too large on some rank
    means: dict[str, Tensor]  # by parameter, if there is nothing bad
    astray: bool = False  # a rank has data, and nothing to say that can be used
    differs: bool = False  # ranks have different fingerprints

    @property
    def is_silence(self) -> bool:
        """Nobody has data any more."""
        return not self.active and not self.astray

    def copied(self) -> Heard:
        """With means that are nobody else's memory."""
        return replace(self, means={name: mean.clone() for name, mean in self.means.items()})


class Exchange:
    """Sends fragments off and takes them in, in an order that is the same on all ranks."""

    def __init__(self, replica: Replica, groups: Sequence[Named]) -> None:
        self.fabric = replica.fabric
        self.pipeline = replica.pipeline(replica.fabric, Units({}))
        self.pipeline.joined = "active"  # whatever is asked for
        self.bucket_bytes = replica.settings.bucket_bytes
        self.rounds = 0
        self.buckets = 0
        self.fragments = [self.fragment_of(named) for named in groups]

    def fragment_of(self, named: Named) -> Fragment:
        """Buckets of parameters that have one dtype, which is at least of 32 bits on the way."""
        slots = [Slot(name, parameter, is_sparse=False) for name, parameter in named]
        dtypes = [torch.promote_types(parameter.dtype, torch.float32) for _, parameter in named]
        items = [
            Item(slot.parameter.numel() * dtype.itemsize, (dtype, slot.parameter.device))
            for slot, dtype in zip(slots, dtypes, strict=True)
        ]
        groups = assign(items, self.bucket_bytes, self.bucket_bytes)
        made = []
        for group in groups:
            members = [slots[at] for at in group]
            is_last = group is groups[-1]
            made.append(Bucket(self.fabric, self.buckets, members, is_last, dtype=dtypes[group[0]]))
            self.buckets += 1
        return Fragment(made)

    def leave(self, fragment: Fragment, fill: Fill, has_data: bool, fingerprint: Fingerprint = NO_FINGERPRINT) -> None:
        """Send a fragment off."""
        self.rounds += 1
        fragment.is_sound = self.filled(fragment, fill)
        contributes = has_data and fragment.is_sound
        for bucket in fragment.buckets:
            if not contributes:
                bucket.side.values.zero_()
            bucket.side.tail.zero_()
            bucket.side.flags.fill_(1)
            if bucket is fragment.buckets[-1]:
                late = has_data and not contributes
                write_verdict(bucket, self.fabric.rank, False, int(contributes), late, fingerprint=fingerprint)
        fragment.flights = [self.pipeline.start(self.rounds, bucket, contributes) for bucket in fragment.buckets]
        is_used = partial(lambda flights: read_verdict(flights).is_good, fragment.flights)
        fragment.ending = self.pipeline.finish(fragment.flights, is_used)

    def filled(self, fragment: Fragment, fill: Fill) -> bool:
        """Write what this rank has to say; whether that can be sent."""
        for slot in fragment.slots:
            fill(slot)
        return all(self.pipeline.takes(bucket.side.values) for bucket in fragment.buckets)

    def hear(self, fragment: Fragment) -> Heard:
        """Wait for a fragment."""
        for flight in fragment.flights:
            self.pipeline.wait(flight)
        if fragment.ending is not None:
            fragment.ending.wait()
        verdict = read_verdict(fragment.flights)
        if verdict.is_good:
            self.rescale(fragment, len(verdict.active))
            self.pipeline.handed_out(fragment.flights)
        bad = [slot.name for bucket in fragment.buckets if bucket.number in verdict.bad for slot in bucket.slots]
        means = {slot.name: slot.view for slot in fragment.slots}
        contributed = self.fabric.rank in verdict.active
        return Heard(verdict.active, contributed, tuple(bad), means, verdict.late, verdict.differs)

    def rescale(self, fragment: Fragment, contributors: int) -> None:
        """Make means over all ranks those over the ones that contributed."""
        if contributors < self.fabric.world:
            for bucket in fragment.buckets:
                bucket.side.values.mul_(self.fabric.world / contributors)

    def sound_ranks(self) -> tuple[int, ...]:
        """Those whose parameters are finite and can be added up, with data or without; all ranks ask together."""
        is_sound = all(fragment.is_sound for fragment in self.fragments)
        answers = self.fabric.all_gather(torch.tensor([int(is_sound)], device=self.fabric.device)).flatten().tolist()
        return tuple(rank for rank, answer in enumerate(answers) if answer)
