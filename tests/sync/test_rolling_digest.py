"""Digests that roll over a replica: equal bits agree, and no difference stays unseen once its window has come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from syncline.errors import ConfigError
from syncline.guards import rolling
from syncline.guards.rolling import SMALLEST_WINDOW_BYTES, RollingDigest

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (5, 3), (1, 4, 1), (2, 3, 4, 5), (1001,), (300, 301)]
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() else tensor,
    "every other": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "channels last": lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor,
    "a parameter": lambda tensor: torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor,
}


def any_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Values of any bits: NaN with payloads, infinities, zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(shape)


def digests(tensors: Sequence[Tensor], passes: int = 200) -> list[int]:
    rolled = RollingDigest(passes)
    return [rolled.of(number, tensors) for number in range(passes)]


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy with one bit changed, counted over the elements in order."""
    data = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    data.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return data.view(tensor.shape)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "SMALLEST_WINDOW_BYTES", 64)


some_tensors = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(sorted(FORMS)), st.integers(0, 2**32)),
    max_size=8,
)


@given(some_tensors, st.integers(1, 300), st.integers(0, 1000))
def test_the_native_kernel_has_the_bits_of_the_torch_one(asked: list, passes: int, number: int) -> None:
    assert rolling.native is not None
    tensors = [FORMS[form](any_bits(shape, dtype, seed)) for shape, dtype, form, seed in asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rolling, "SMALLEST_WINDOW_BYTES", 64)
        ours = RollingDigest(passes).of(number, tensors)
        patch.setattr(rolling, "native", None)
        assert RollingDigest(passes).of(number, tensors) == ours
        assert 0 <= ours < 2**32


@given(some_tensors, st.integers(1, 40))
def test_the_same_values_have_one_digest_whatever_their_memory_format(asked: list, passes: int) -> None:
    tensors = [any_bits(shape, dtype, seed) for shape, dtype, _, seed in asked]
    others = [FORMS[form](tensor.clone()) for tensor, (_, _, form, _) in zip(tensors, asked, strict=True)]
    assert digests(tensors, passes) == digests(others, passes)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_every_flip_of_a_bit_is_found_within_so_many_passes(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "torch":
        monkeypatch.setattr(rolling, "native", None)
    state = [any_bits((5, 3), torch.float32, 1), torch.zeros(7, dtype=torch.bfloat16), torch.tensor(3.0)]
    state += [torch.zeros(0), any_bits((9,), torch.int64, 2), torch.zeros(5, dtype=torch.bool)]
    passes = 3
    before = digests(state, passes)
    for index, tensor in enumerate(state):
        for bit in range(8 * tensor.nbytes):
            after = digests([*state[:index], flipped(tensor, bit), *state[index + 1 :]], passes)
            assert sum(a != b for a, b in zip(before, after, strict=True)) == 1, (index, bit)


@pytest.mark.usefixtures("small_windows")
def test_what_cancels_in_sums_and_exclusive_ors_is_found() -> None:
    a, b = torch.arange(8.0), torch.arange(8.0, 16.0)
    whole = digests([a, b], 1)
    assert digests([b, a], 1) != whole
    assert digests([a.flip(0), b], 1) != whole
    assert digests([-a, -b], 1) != whole
    assert digests([torch.zeros(8), torch.zeros(8)], 1) != digests([-torch.zeros(8), -torch.zeros(8)], 1)
    assert digests([torch.zeros(3), torch.zeros(5)], 1) != digests([torch.zeros(5), torch.zeros(3)], 1)
    assert digests([torch.zeros(8)], 1) != digests([torch.zeros(9)], 1)


def test_bits_of_nan_and_of_complex_numbers_count() -> None:
    nan = torch.tensor([float("nan")])
    assert digests([nan], 1) != digests([flipped(nan, 0)], 1)
    pair = torch.tensor([1 + 2j, 3 - 1j])
    assert digests([pair.conj()], 1) == digests([pair.conj().resolve_conj()], 1)
    assert digests([pair.conj()], 1) != digests([pair], 1)
    one = torch.tensor([1 + 2j]).conj().imag  # contiguous, and negated lazily
    assert digests([one], 1) == digests([torch.tensor([-2.0])], 1)


@pytest.mark.parametrize("passes", [1, 3, 200])
@pytest.mark.parametrize("numel", [0, 1, 16_384, 16_385, 1_000_003])
def test_windows_cover_every_byte_once_within_so_many_numbers(passes: int, numel: int) -> None:
    layout = rolling.Layout((8, 4 * numel, 0, 3), passes)
    covered: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 3: []}
    for number in range(layout.num_windows):
        for index, lo, hi in layout.window(number):
            assert lo < hi
            covered[index].append((lo, hi))
    assert layout.num_windows <= passes
    for index, ranges in covered.items():
        ends = [0, *(hi for _, hi in ranges)]
        assert [lo for lo, _ in ranges] == ends[:-1]
        assert ends[-1] == layout.sizes[index]
    assert list(layout.window(layout.num_windows + 1)) == list(layout.window(1))


def test_a_tensor_that_is_replaced_or_resized_is_noticed() -> None:
    tensors = [torch.zeros(100), torch.ones(100)]
    rolled = RollingDigest()
    before = rolled.of(0, tensors)
    replaced = [tensors[0], torch.full((100,), 2.0)]
    assert rolled.of(0, replaced) != before
    assert rolled.of(0, tensors) == before
    tensors[1].data = torch.ones(99)
    assert rolled.of(0, tensors) != before
    tensors[1].data = torch.ones(100)
    assert rolled.of(0, tensors) == before
    tensors[0].resize_(101)
    assert rolled.of(0, tensors) == RollingDigest().of(0, tensors) != before
    tensors.pop()
    assert rolled.of(0, tensors) == RollingDigest().of(0, tensors)


def test_tensors_beyond_the_window_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(SMALLEST_WINDOW_BYTES // 4) for _ in range(10)]
    read = []
    monkeypatch.setattr(rolling.Span, "lies_in_a_row", lambda span: read.append(span.tensor) or True)
    RollingDigest().of(3, tensors)
    (only,) = read
    assert only is tensors[3]


def test_nothing_has_a_digest_and_no_passes_are_refused() -> None:
    assert RollingDigest().of(17, []) == RollingDigest().of(3, [])
    with pytest.raises(ConfigError, match="passes=0"):
        RollingDigest(0)
