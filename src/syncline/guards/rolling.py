"""A digest of a window of the replica's bytes, which rolls over all of them from step to step.

    tensors   | weight      | bias | exp_avg     | exp_avg_sq  | step |   the bytes of all, in order
    windows   |     0     |     1     |     2     |     3     |  4   |   number 0, 1, 2, 3, 4, 0, 1, ...

The digest is the sum over the window's 64-bit words of `mix(word + place * STEP)` modulo 2^64, folded to 32 bits. `mix`
is the finalizer of MurmurHash3, so every place has a bijection of its own: what plain sums and exclusive ors do not see
(swapped words, two flips of the same bit) changes the digest. Equal bits always give equal digests; different ones give
equal digests with odds of 2^-32. NaN payloads and the sign of zero are bits like others. All sizes are in every digest.
The native kernel (native/digest_kernels.h) and the torch one have the same bits, on all processors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from operator import attrgetter

import torch
from torch import Tensor

from syncline.core.native import native
from syncline.errors import ConfigError

SMALLEST_WINDOW_BYTES = 16 * 1024
WORD = 8
bytes_of = attrgetter("nbytes")
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


class RollingDigest:
    """Digests that cover all bytes of a list of tensors within `passes` consecutive numbers.

    A digest depends on the number and the tensors alone, not on earlier calls: a rank that joins later agrees at once.
    """

    def __init__(self, passes: int = 200) -> None:
        if passes < 1:
            raise ConfigError(f"passes={passes} would never cover the tensors; give 1 or more")
        self.passes = passes
        self.layout = Layout((), passes)
        self.tensors: Sequence[Tensor] = ()  # the list that the layout is of
        self.runs: dict[int, list[Run]] = {}  # of windows that were asked for

    def of(self, number: int, tensors: Sequence[Tensor]) -> int:
        """32-bit digest of the window `number` of the tensors' bytes.

        All of them are covered within `passes` consecutive numbers. Tensors outside of the window are not read, and
        those of the same list as the last time not even asked for their sizes.
        """
        if tensors is not self.tensors or len(tensors) != len(self.layout.sizes):
            self.lay_out(tensors)
        runs = self.runs_of(number)
        if not all(run.is_as_laid_out() for run in runs):  # data was replaced
            self.lay_out(tensors)
            runs = self.runs_of(number)
        total = (self.layout.digest + sum(run.digest() for run in runs)) % 2**64
        return total >> 32 ^ total & 0xFFFFFFFF

    @property
    def has_one_window(self) -> bool:
        """Whether every digest covers all bytes, of the tensors that the last one was of."""
        return self.layout.num_windows == 1

    def lay_out(self, tensors: Sequence[Tensor]) -> None:
        """Lay out windows for tensors of these sizes."""
        self.tensors = tensors
        self.runs = {}
        sizes = tuple([tensor.nbytes for tensor in tensors])
        if sizes != self.layout.sizes:
            self.layout = Layout(sizes, self.passes)

    def runs_of(self, number: int) -> list[Run]:
        """What is to be read in a window, worked out the first time that it is asked for."""
        window = number % self.layout.num_windows
        if window not in self.runs:
            spans = [Span(self.tensors[index], lo, hi) for index, lo, hi in self.layout.window(window)]
            self.runs[window] = runs_of(spans)
        return self.runs[window]

    def forget(self) -> None:
        """Keep no tensor alive."""
        self.tensors, self.runs = (), {}


@dataclass(frozen=True)
class Layout:
    """Where tensors of these sizes in bytes lie, one after the other, and the windows they are cut into."""

    sizes: tuple[int, ...]
    passes: int

    @cached_property
    def ends(self) -> list[int]:
        """Byte after the last one of every tensor."""
        return list(accumulate(self.sizes))

    @cached_property
    def window_bytes(self) -> int:
        """Length of a window, in whole words: 1/passes of everything, or the smallest one that is worth a call."""
        total = sum(self.sizes)
        return max(SMALLEST_WINDOW_BYTES, -(-total // (self.passes * WORD)) * WORD)

    @cached_property
    def num_windows(self) -> int:
        """How many windows there are, `passes` at most; the last may be short."""
        return max(1, -(-sum(self.sizes) // self.window_bytes))

    @cached_property
    def digest(self) -> int:
        """64-bit digest of the sizes themselves."""
        return digest_words(torch.tensor(self.sizes, dtype=torch.int64), 0)

    def window(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Every tensor in the window: its index, and which of its bytes, from and to."""
        lo = number % self.num_windows * self.window_bytes
        hi = lo + self.window_bytes
        for index in range(bisect_right(self.ends, lo), len(self.sizes)):
            start = self.ends[index] - self.sizes[index]
            if start >= hi:
                return
            if self.sizes[index]:
                yield index, max(lo - start, 0), min(hi, self.ends[index]) - start


class Span:
    """Some bytes of a tensor, in the order of its elements, which need not be that of its memory."""

    __slots__ = ("hi", "lo", "num_words", "place", "size", "tensor")

    def __init__(self, tensor: Tensor, lo: int, hi: int) -> None:
        self.tensor = tensor
        self.lo = lo
        self.hi = hi
        self.size = tensor.nbytes
        self.num_words = (hi - lo + WORD - 1) // WORD  # the last one may be short
        self.place = None if native is not None and tensor.is_cpu else tensor.device  # None: the native kernel reads it

    def bytes(self) -> Tensor:
        """Copy of the bytes, and for a moment of the rows that hold them; a row is one element where possible."""
        tensor = self.tensor.detach()
        rows = tensor.view(-1) if tensor.is_contiguous() else tensor.squeeze()
        row_bytes = rows.nbytes // len(rows)
        first, last = self.lo // row_bytes, -(-self.hi // row_bytes)
        some = rows[first:last].resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return some.view(-1).view(torch.uint8)[self.lo - first * row_bytes : self.hi - first * row_bytes]

    def piece(self) -> tuple[int, int]:
        """Address and number of the bytes, where they lie in a row."""
        return self.tensor.data_ptr() + self.lo, self.hi - self.lo

    def lies_in_a_row(self) -> bool:
        """Whether the bytes can be read where they are."""
        return self.tensor.is_contiguous() and not self.tensor.is_conj() and not self.tensor.is_neg()


class Run:
    """Spans in one place, one after the other, of which each begins a new word."""

    def __init__(self, place: torch.device | None, spans: list[Span], first: int) -> None:
        self.place = place
        self.spans = spans
        self.first = first  # number of the first word
        self.tensors = [span.tensor for span in spans]
        self.sizes = [span.size for span in spans]
        self.pointers: list[int] = []  # of the tensors, when `pieces` were found
        self.pieces: list[tuple[int, int]] = []  # what the native kernel reads, where no copy is needed

    def is_as_laid_out(self) -> bool:
        """Whether the tensors are as large as they were."""
        return list(map(bytes_of, self.tensors)) == self.sizes

    def digest(self) -> int:
        """64-bit sum over the words of all spans."""
        if self.place is not None:
            return digest_words(words_of(self.spans), self.first)
        pointers = [tensor.data_ptr() for tensor in self.tensors]
        if pointers != self.pointers or not self.pieces:
            in_a_row = all(span.lies_in_a_row() for span in self.spans)
            self.pointers = pointers
            self.pieces = [span.piece() for span in self.spans] if in_a_row else []
        if self.pieces:
            return int(native.digest(self.pieces, self.first))  # type: ignore[union-attr]
        return digest_natively(self.spans, self.first)


def runs_of(spans: Sequence[Span]) -> list[Run]:
    """Spans by place."""
    runs, first = [], 0
    for place, several in groupby(spans, lambda span: span.place):
        runs.append(Run(place, list(several), first))
        first += sum(span.num_words for span in runs[-1].spans)
    return runs


def digest_natively(spans: Sequence[Span], first: int) -> int:
    """Sum of the native kernel over tensors in the memory of this machine."""
    pieces, copies = [], []
    for span in spans:
        if span.lies_in_a_row():
            pieces.append(span.piece())
        else:
            copies.append(span.bytes())
            pieces.append((copies[-1].data_ptr(), span.hi - span.lo))
    return int(native.digest(pieces, first))  # type: ignore[union-attr]


def words_of(spans: Sequence[Span]) -> Tensor:
    """All bytes as 64-bit words; those of each span are filled up with zeros."""
    parts = []
    for span in spans:
        data = span.bytes()
        parts += [data, data.new_zeros(-len(data) % WORD)]
    return torch.cat(parts).view(torch.int64)


def digest_words(words: Tensor, first: int) -> int:
    """Sum of mixed words, of which the first has the number `first`; the torch kernel, bit-equal to the native one."""
    places = torch.arange(first + 1, first + 1 + len(words), device=words.device)
    mixed = shifted(words + places * signed(STEP)) * signed(FIRST)
    mixed = shifted(mixed) * signed(SECOND)
    return int(shifted(mixed).sum()) % 2**64


def shifted(words: Tensor) -> Tensor:
    """Words with their upper bits on the lower ones; `>>` of signed integers would draw in the sign."""
    return words ^ (words >> 33 & 2**31 - 1)


def signed(number: int) -> int:
    """The signed integer with the bits of an unsigned one: torch multiplies signed ones modulo 2^64."""
    return number - 2**64 if number >= 2**63 else number
