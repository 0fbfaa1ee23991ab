"""A plan: which gradients share a bucket, in which order buckets leave, and how they travel. It never changes.

Before the first pass nobody knows in which order gradients come, so the first plan only observes. The first pass,
unfrozen parameters, a checkpoint and `Sync.reconfigure` all make another plan, which is adopted between two passes;
ranks that adopt one have compared its digest, or have it from rank 0. Making one is a pure function.

Parameters are taken in the order in which their gradients are expected: a bucket takes the next one until it has
reached its limit, so the limit is overshot by less than one parameter. The first bucket is small, so that communication
starts early. Only gradients of the same dtype on the same device can share one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from syncline.units import MIB

DIGEST_BITS = 24  # as many as fit a word of a status


class Gradient(NamedTuple):
    """A gradient to be placed in a bucket."""

    name: str
    nbytes: int
    kind: Hashable  # dtype and device


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does between backward and step, as one value."""

    mode: str = "sync"
    codec: str = "none"
    collective: str = "auto"
    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = MIB
    buckets: tuple[tuple[str, ...], ...] | None = None  # names of parameters; None before the first pass

    @property
    def observes(self) -> bool:
        """Whether gradients only show in which order they come."""
        return self.buckets is None

    @property
    def order(self) -> tuple[str, ...]:
        """Names of parameters in the order in which their gradients are expected."""
        return tuple(name for bucket in self.buckets or () for name in bucket)

    def bucketed(self, gradients: Sequence[Gradient]) -> Plan:
        """This plan with buckets for gradients, given in the order in which they are expected."""
        return replace(self, buckets=assign(gradients, self.first_bucket_bytes, self.bucket_bytes))

    def extended(self, gradients: Sequence[Gradient]) -> Plan:
        """This plan with further buckets, for gradients that come beside those that it has."""
        more = assign(gradients, self.first_bucket_bytes, self.bucket_bytes)
        return replace(self, buckets=(*(self.buckets or ()), *more))

    def digest(self) -> int:
        """A number that differs between plans that differ."""
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=DIGEST_BITS // 8).digest(), "big")


def assign(gradients: Sequence[Gradient], first_bucket_bytes: int, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
    """Names of the gradients of each bucket, in the order in which the buckets are expected to be full."""
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    closed: set[Hashable] = set()
    for position, gradient in enumerate(gradients):
        members, size = filling.pop(gradient.kind, ([], 0))
        members.append(position)
        size += gradient.nbytes
        if size >= (bucket_bytes if gradient.kind in closed else first_bucket_bytes):
            closed.add(gradient.kind)
            buckets.append(members)
        else:
            filling[gradient.kind] = (members, size)
    buckets += [members for members, _ in filling.values()]
    return tuple(tuple(gradients[position].name for position in members) for members in sorted(buckets, key=max))
