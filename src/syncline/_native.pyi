"""What native/bindings.cc offers. The module is absent when no C++ compiler was there at install.

Pointers are integers (`tensor.data_ptr()`), dtypes and ops the codes of `syncline.fabric.shm`. The caller keeps the
memory alive until the call, or its handle, is done.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def build_info() -> dict[str, str]:
    """Return the "compiler", the "cpp_standard", and as "simd" the widest level that this processor has."""

# The kernels of codecs; see native/codec_kernels.h.

def take_quantized(scales: int, codes: int, values: int, noise: int, count: int, block: int, bits: int) -> None: ...
def dequantize(out: int, scales: int, codes: int, count: int, block: int, bits: int, how: int) -> None: ...
def add_residual(out: int, gradient: int, residual: int, count: int) -> float:
    """Return the largest magnitude of the sums; `residual` may be 0 for none."""

def take_signs(scales: int, bits: int, values: int, count: int, block: int) -> None: ...
def unpack_signs(out: int, scales: int, bits: int, count: int, block: int, how: int) -> None: ...
def select_largest(positions: int, values: int, rows: int, columns: int, wanted: int) -> None: ...
def entries_room(count: int, numel: int, form: int) -> int: ...
def take_entries(message: int, values: int, numel: int, positions: int, count: int, form: int) -> int:
    """Return the bytes that were written."""

def mean_of_entries(out: int, numel: int, messages: Sequence[int], bytes: Sequence[int], form: int) -> None: ...

# The kernels of PowerSGD; see native/low_rank_kernels.h.

def times_rights(lefts: int, values: int, matrices: Sequence[Sequence[int]], rights: int) -> None: ...
def take_rights(rights: int, values: int, matrices: Sequence[Sequence[int]], lefts: int) -> None: ...
def write_products(out: int, matrices: Sequence[Sequence[int]], lefts: int, rights: int) -> None: ...
def orthonormalize(rows: int, shapes: Sequence[Sequence[int]]) -> bool: ...

# 16-bit floats; see native/halves.h.

def narrow(out: int, values: int, count: int, dtype: int) -> None: ...
def narrow_saturated(out: int, values: int, count: int, dtype: int) -> None: ...
def widen(out: int, halves: int, count: int, dtype: int) -> bool: ...
def mean(out: int, rows: Sequence[int], count: int, dtype: int) -> None:
    """Write the mean of rows, added in float32 from the first to the last; see native/kernels.h."""

# Gradients on their way into a bucket, past the cache; see native/kernels.h.

def copy(moves: list[tuple[int, int, int]], dtype: int) -> None:
    """Write values: to, from, how many."""

def divide(moves: list[tuple[int, int, int]], dtype: int, divisor: int) -> bool:
    """Write quotients: to, from, how many; to may be from. Returns whether all are finite."""

# Digests of replicas; see native/digest_kernels.h.

def digest(pieces: list[tuple[int, int]], first: int) -> int:
    """Sum over the 64-bit words of pieces (data, bytes), the first of which has the number `first`."""

class Handle:
    """A call that was submitted."""

    def wait(self, seconds: float = -1.0) -> bool:
        """True when it is done, False when that many seconds passed first; negative means no limit."""

    def done(self) -> bool: ...
    def finite(self) -> bool | None:
        """Whether no element of the result is infinite or NaN; None where that is not known."""

    def times(self) -> tuple[int, int, int]:
        """Nanoseconds of `time.monotonic_ns`: when it began, when all ranks had arrived, and when it was over."""

class Group:
    """One rank of a group that shares memory."""

    def __init__(
        self, address: str, rank: int, world: int, nonce: bytes, deadline_s: float, join_deadline_s: float
    ) -> None: ...
    def buffer(self, bytes: int) -> npt.NDArray[np.uint8]:
        """Zeroed memory that peers can reach; it lives as long as the array."""

    def reaches(self, data: int, bytes: int) -> bool:
        """Whether peers can reach that memory."""

    def barrier(self) -> None: ...
    def all_reduce(self, data: int, count: int, dtype: int, op: int, label: str = "") -> None: ...
    def run_schedule(
        self, data: int, count: int, dtype: int, op: int, rows: npt.NDArray[np.int64], label: str = ""
    ) -> None: ...
    def submit(self, data: int, count: int, dtype: int, op: int, label: str = "") -> Handle: ...
    def submit_schedule(
        self, data: int, count: int, dtype: int, op: int, rows: npt.NDArray[np.int64], label: str = ""
    ) -> Handle: ...
    def reduce_scatter(self, input: int, output: int, count: int, dtype: int, op: int, label: str = "") -> None: ...
    def all_gather(self, input: int, output: int, count: int, dtype: int) -> None: ...
    def submit_all_gather(self, input: int, output: int, count: int, dtype: int) -> Handle: ...
    def submit_all_to_all(self, input: int, output: int, count: int, dtype: int) -> Handle: ...
    def abort(self, why: str) -> None:
        """End what is under way, and all that comes, here and on the other ranks."""

    def broadcast(self, data: int, count: int, dtype: int, root: int) -> None: ...
    def all_to_all(self, input: int, output: int, count: int, dtype: int) -> None: ...
    def send(self, data: int, bytes: int, to: int) -> int:
        """Start a message; returns its number."""

    def receive(self, data: int, bytes: int, source: int) -> int:
        """Expect a message; returns its number."""

    def wait_sent(self, to: int, number: int, deadline_s: float) -> None: ...
    def wait_received(self, source: int, number: int, deadline_s: float) -> None: ...
    def unsynchronized_all_reduce(self, data: int, count: int, dtype: int, op: int) -> None:
        """The reads and writes of an all-reduce without any waiting: the limit of the machine, for benchmarks."""

    def write_note(self, numbers: Sequence[int]) -> None:
        """Four numbers that peers can read at any time, also after this rank was killed or stopped."""

    def note_of(self, rank: int) -> list[int]:
        """What a rank has noted last."""

    def suspect(self) -> int:
        """The rank that the running call waits for, or -1."""

    def close(self, drain: bool = True) -> None: ...
