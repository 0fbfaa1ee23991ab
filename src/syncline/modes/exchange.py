"""Means of parameters, or of how far they have come, over ranks: in buckets, along the same path as gradients.

A fragment is a part of the model that is exchanged as a whole. Its status says which ranks had something to contribute.
The others, which have no data, or nothing that is finite and can be added up, send zeros and
take what comes. Where a codec cannot go on from what it has kept on some rank, nothing comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from syncline.codecs.none import void
from syncline.core.passes import NO_DATA
from syncline.core.plan import Gradient, assign
from syncline.core.status import Call, OwnStatus
from syncline.guards.fingerprint import NO_FINGERPRINT, Fingerprint
from syncline.modes.replica import Replica
from syncline.path.bucket import Bucket, Slot
from syncline.path.flushing import Dense
from syncline.path.path import Path
from syncline.path.residuals import GradientScale
from syncline.path.work import PassWork
from syncline.reducer.parameters import Named

DISPLACEMENTS = GradientScale({})  # parameters move by what is sent, whatever their learning rates are
Fill = Callable[[Slot], None]  # writes what a rank contributes to `slot.view`


@dataclass
class Fragment:
    """A part of the model, and its buckets."""

    buckets: list[Bucket]
    work: PassWork | None = None  # when it has left
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
        self.path: Path = replica.path(replica.fabric, DISPLACEMENTS)
        self.path.joined = "active"  # whatever is asked for
        self.bucket_bytes = replica.settings.bucket_bytes
        self.rounds = 0
        self.buckets = 0
        self.fragments = [self.fragment_of(named) for named in groups]

    def fragment_of(self, named: Named) -> Fragment:
        """Buckets of parameters that have one dtype, which is at least of 32 bits on the way."""
        slots = [Slot(name, parameter, is_sparse=False) for name, parameter in named]
        by_name = {slot.name: slot for slot in slots}
        dtypes = {name: torch.promote_types(parameter.dtype, torch.float32) for name, parameter in named}
        gradients = [
            Gradient(name, parameter.numel() * dtypes[name].itemsize, (dtypes[name], parameter.device))
            for name, parameter in named
        ]
        made = []
        for names in assign(gradients, self.bucket_bytes, self.bucket_bytes):
            members = [by_name[name] for name in names]
            made.append(Bucket(self.fabric, self.buckets, members, dtype=dtypes[names[0]]))
            self.buckets += 1
        return Fragment(made)

    def leave(
        self,
        fragment: Fragment,
        fill: Fill,
        has_data: bool,
        fingerprint: Fingerprint = NO_FINGERPRINT,
        call: Call = Call.SYNCHRONIZE,
    ) -> None:
        """Send a fragment off."""
        self.rounds += 1
        fragment.is_sound = self.filled(fragment, fill)
        contributes = has_data and fragment.is_sound
        fragment.work = self.path.begin(self.rounds, contributes)
        for bucket in fragment.buckets:
            if not contributes:
                bucket.buffer.values.zero_()
            self.path.start(fragment.work, bucket)
        own = OwnStatus(self.rounds, int(contributes) or NO_DATA, late=has_data and not contributes)
        own.digest = fingerprint.digest
        own.call = call
        own.present = [1] * len(fragment.slots)
        self.path.end(fragment.work, own)

    def filled(self, fragment: Fragment, fill: Fill) -> bool:
        """Write what this rank has to say; whether that can be sent."""
        for slot in fragment.slots:
            fill(slot)
        return all(self.path.takes(bucket.buffer.values) for bucket in fragment.buckets)

    def hear(self, fragment: Fragment) -> Heard:
        """Wait for a fragment."""
        assert fragment.work is not None
        status = self.path.wait(fragment.work)
        status.refuse_different_calls()
        if status.is_good:
            self.rescale(fragment, len(status.active))
            self.path.grads_assigned(fragment.work)
            self.path.count_good(fragment.work)
        bad = [slot.name for bucket in fragment.buckets if bucket.number in status.nonfinite for slot in bucket.slots]
        means = {slot.name: slot.view for slot in fragment.slots}
        contributed = self.fabric.rank in status.active
        return Heard(status.active, contributed, tuple(bad), means, status.late, status.differs)

    def rescale(self, fragment: Fragment, contributors: int) -> None:
        """Make means over all ranks those over the ones that contributed."""
        if contributors < self.fabric.world:
            for bucket in fragment.buckets:
                bucket.buffer.values.mul_(self.fabric.world / contributors)

    def announce(self, fragment: Fragment, call: Call) -> None:
        """Say without any data what this rank does; raise `Desync` unless all ranks do it."""
        self.leave(fragment, lambda slot: void(slot.view.zero_()), has_data=False, call=call)
        assert fragment.work is not None
        self.path.wait(fragment.work).refuse_different_calls()

    def send_densely(self, replica: Replica) -> None:
        """From now on send residuals in full with what is sent next, so that none is left."""
        dense = replica.path(self.fabric, DISPLACEMENTS, Dense())
        dense.good_passes = self.path.good_passes
        dense.joined = self.path.joined
        dense.load_state_dict(self.path.state_dict() | {"state": {}})
        self.path.close()
        self.path = dense

    def sound_ranks(self) -> tuple[int, ...]:
        """Those whose parameters are finite and can be added up, with data or without; all ranks ask together."""
        is_sound = all(fragment.is_sound for fragment in self.fragments)
        answers = self.fabric.all_gather(torch.tensor([int(is_sound)], device=self.fabric.device)).flatten().tolist()
        return tuple(rank for rank, answer in enumerate(answers) if answer)
