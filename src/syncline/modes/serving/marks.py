"""Whether gradients have changed since backward ended, as by clipping and unscaling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.core.torch_internals import version_of
from syncline.path.bucket import Bucket, BucketBuffer

MARK_ELEMENTS = 1 << 16  # that are looked at


class Marks:
    """Of the gradients of buckets, when backward had ended."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[int, float]] = {}

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Remember how they are."""
        self.of = {bucket.number: mark_of(bucket.buffer) for bucket in buckets}

    def have_changed(self, buckets: Sequence[Bucket]) -> bool:
        """Whether any is another one, or elsewhere."""
        return any(has_moved(bucket) or mark_of(bucket.buffer) != self.of.get(bucket.number) for bucket in buckets)


def has_moved(bucket: Bucket) -> bool:
    """Whether a parameter has a gradient that is not in the bucket."""
    return any(slot.parameter.grad is not slot.view for slot in bucket.slots if slot.parameter.grad is not None)


def mark_of(buffer: BucketBuffer) -> tuple[int, float]:
    """Changes when gradients do: torch counts changes, except by `GradScaler`, which multiplies all of them."""
    values = buffer.values
    wide = torch.promote_types(values.dtype, torch.float32)
    size = torch.linalg.vector_norm(values[:: max(1, len(values) // MARK_ELEMENTS)], dtype=wide).item()
    return version_of(values), size or torch.linalg.vector_norm(values, dtype=wide).item()
