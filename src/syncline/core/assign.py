"""Which gradients share a bucket.

Parameters are taken in the order in which their gradients are expected: a bucket takes the next one until it has
reached its limit, so the limit is overshot by less than one parameter. The first bucket is small, so that communication
starts early. Only gradients of the same dtype on the same device can share one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """A gradient to be placed."""

    nbytes: int
    kind: Hashable  # dtype and device


def assign(items: Sequence[Item], first_bytes: int, bucket_bytes: int) -> list[list[int]]:
    """Positions of the items of each bucket, in the order in which the buckets are expected to be full."""
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    closed: set[Hashable] = set()
    for position, item in enumerate(items):
        members, size = filling.pop(item.kind, ([], 0))
        members.append(position)
        size += item.nbytes
        if size >= (bucket_bytes if item.kind in closed else first_bytes):
            closed.add(item.kind)
            buckets.append(members)
        else:
            filling[item.kind] = (members, size)
    buckets += [members for members, _ in filling.values()]
    return sorted(buckets, key=max)
