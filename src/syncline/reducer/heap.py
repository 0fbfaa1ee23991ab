"""What becomes of the memory of gradients, which are freed as soon as they are in their bucket.

glibc gives large blocks back to the system, so that every page of the next gradient is a page fault; together they can
take longer than the copy into the bucket. How much it keeps it learns from what is freed, and so depends on what the
process did before. Here it is told to keep blocks as large, and as much at the end of a heap, as it would ever learn.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

# <malloc.h>
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3

KEPT_ANYWAY = 128 << 10  # bytes of a block that nothing has to be said for
LARGEST_KEPT = 32 << 20  # bytes of a block
MOST_KEPT = 64 << 20  # bytes at the end of a heap
CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(largest: int) -> None:
    """Have memory kept when it is freed, if some blocks are as large as this and the user has not said otherwise."""
    if largest <= KEPT_ANYWAY or any(name in os.environ for name in CHOSEN_BY_USER):
        return
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TOP_PAD, MOST_KEPT)
