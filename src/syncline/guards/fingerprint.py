"""The fingerprint of a replica, which travels with every pass at no message: ranks see whether theirs are the same.

It is made of hyperparameters, of what happened to parameters and optimizer state outside the optimizer's step, and of a
part of their bytes, another one in every pass. Where fingerprints differ, or a rank has touched its replica in a way
that was not found harmless before, all ranks compare all of it before they step.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.guards.changes import NOTHING, Changes, Outside
from syncline.guards.hyperparameters import Hyperparameters
from syncline.guards.loads import Named
from syncline.guards.rolling import RollingDigest
from syncline.tracing.spans import Recorder

DIGEST_BITS = 24  # of a fingerprint; one that is equal by chance is another one in the next pass
COVERED_WITHIN = 200  # passes in which every byte of the replica is hashed once
HASH_EVERY = 2  # passes; what a window costs is mostly to find it, so larger ones less often cost less
LOOKED_AT = 3  # comparisons after which changes of a kind that left replicas equal are taken for a habit of the loop
PARTS = struct.Struct("<q8sdqqQ")  # number of the pass, hyperparameters, loss scale, changes, loads, window of bytes
MOST_KINDS = 8  # of changes that are told apart; a loop that has more of them changes its weights all the time


class Fingerprint(NamedTuple):
    """What a rank tells of its replica in a pass."""

    touched: bool = False
    digest: int = 0


NO_FINGERPRINT = Fingerprint()


class ReplicaGuard:
    """Makes the fingerprints of one replica."""

    def __init__(
        self,
        model: nn.Module,
        named: Named,
        optimizers: Sequence[Optimizer],
        find_state: Callable[[], list[Tensor]],
        scaler: torch.amp.GradScaler | None,
        recorder: Recorder,
    ) -> None:
        self.hyperparameters = Hyperparameters(optimizers)
        self.changes = Changes(model, named, optimizers, find_state)
        self.rolling = RollingDigest(COVERED_WITHIN // HASH_EVERY)
        self.scaler = scaler
        self.recorder = recorder
        self.told: set[Outside] = set()  # since replicas were last found equal
        self.harmless: Counter[Outside] = Counter()  # how often replicas were equal after changes of this kind
        self.comparisons = 0  # of whole replicas

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What happens inside is time of the guard."""
        began_ns = monotonic_ns()
        try:
            yield
        finally:
            self.recorder.guard_ns += monotonic_ns() - began_ns

    def fingerprint(self, number: int) -> Fingerprint:
        """The fingerprint for the pass of this number, by which it is salted."""
        with self.timed():
            self.changes.find_replaced(number)
            outside = self.changes.take()
            if self.is_habit(outside):
                outside = NOTHING
            else:
                self.told.add(outside)
            scale = self.scaler.get_scale() if self.scaler is not None else 1.0
            window = self.hash_window(number)
            digest = quick_digest(number, self.hyperparameters.digest(), scale, outside, window)
            return Fingerprint(outside != NOTHING, digest)

    def hash_window(self, number: int) -> int:
        """Hash of the next window of the replica's bytes; 0 in passes between windows, where there are several."""
        if number % HASH_EVERY and not self.rolling.has_one_window:
            return 0
        return self.rolling.of(number // HASH_EVERY, self.changes.tensors)

    def is_habit(self, outside: Outside) -> bool:
        """Whether such changes need no comparison: there are none, or replicas were equal after them before."""
        if outside == NOTHING or self.harmless[outside] >= LOOKED_AT:
            return True
        return outside not in self.harmless and len(self.harmless) >= MOST_KINDS

    @property
    def has_touched(self) -> bool:
        """Whether this rank told of changes since replicas were last found equal."""
        return bool(self.told)

    def begin_step(self) -> None:
        """The optimizer is about to make its step."""
        self.changes.begin_step()
        if self.changes.renews:
            self.rolling.forget()

    def end_step(self) -> None:
        """The optimizer has made its step."""
        with self.timed():
            self.changes.end_step()

    def found_equal(self) -> None:
        """All ranks have compared their replicas."""
        self.comparisons += 1
        self.harmless.update(self.told)
        self.told.clear()

    def tell_again(self) -> None:
        """Nobody could use the pass in which this rank told of changes."""
        self.changes.outside = Outside(self.changes.outside.changes, self.changes.outside.loads + 1)

    def accept(self) -> None:
        """All ranks have been made equal."""
        self.changes.accept()
        self.told.clear()

    def close(self) -> None:
        """Stop watching."""
        self.changes.close()


def quick_digest(number: int, hyperparameters: bytes, scale: float, outside: Outside, window: int) -> int:
    """`DIGEST_BITS` bits of a replica's fingerprint, in a microsecond: different ones are equal by chance only."""
    packed: bytes = PARTS.pack(number, hyperparameters, scale, *outside, window)
    return int(zlib.crc32(packed)) & (1 << DIGEST_BITS) - 1


def digest_of(*parts: object) -> int:
    """`DIGEST_BITS` bits that depend on all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=DIGEST_BITS // 8).digest(), "big")
