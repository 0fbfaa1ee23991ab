"""Native kernels against their twins in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.references import same_bits
from syncline.codecs import entries, kernels, low_rank, twins
from syncline.codecs.entries import FORMS
from syncline.codecs.low_rank import Matrix, left_shapes, right_shapes


def assert_decoded(decode: Callable[..., None], wanted: Tensor) -> None:
    """Written, added and subtracted."""
    start = torch.arange(float(len(wanted)))
    for how, combine in kernels.HOWS.items():
        out = start.clone()
        decode(out=out, how=how)
        assert torch.equal(out, combine(start.clone(), wanted))


@pytest.mark.parametrize("numel", [1, 7, 8, 255, 256, 1000, 20_001])
@pytest.mark.parametrize("block", [8, 64, 256])
def test_native_kernels_equal_their_twins(numel: int, block: int) -> None:
    assert kernels.native is not None
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator)
    values[numel // 2] = 0.0
    noise = torch.rand(numel, generator=generator)
    for bits in (8, 4):
        for drawn in (None, noise):
            left = values.clone()
            message = kernels.take_quantized(left, block, bits, drawn)
            assert torch.equal(message, twins.quantize(values, block, bits, drawn))
            decoded = twins.dequantize(message, numel, block, bits)
            assert torch.equal(left, values - decoded)
            assert_decoded(partial(kernels.dequantize, message, block=block, bits=bits), decoded)
    left = values.clone()
    signs = kernels.take_signs(left, block)
    head = -(-numel // block) * 2
    theirs = twins.pack_signs(values, block)
    assert torch.equal(signs[head:], theirs[head:])
    torch.testing.assert_close(signs[:head].view(torch.bfloat16), theirs[:head].view(torch.bfloat16))
    assert_decoded(partial(kernels.unpack_signs, signs, block=block), twins.unpack_signs(signs, numel, block))
    assert torch.equal(left, values - twins.unpack_signs(signs, numel, block))
    count = max(1, numel // 10)
    chosen = kernels.select_largest(values, count)
    assert torch.equal(chosen, twins.select_largest(values, count))


@given(st.sampled_from(FORMS), st.integers(0, 2**32), st.integers(0, 70_000), st.floats(0, 1), st.integers(1, 5))
def test_native_messages_and_means_equal_their_twins(
    form: str, seed: int, numel: int, density: float, world: int
) -> None:
    assert kernels.native is not None
    generator = torch.Generator().manual_seed(seed)
    messages = []
    for _ in range(world):
        values = torch.randn(numel, generator=generator) * 1e4
        positions = (torch.rand(numel, generator=generator) < density**4).nonzero().view(-1)
        ours, theirs = values.clone(), values.clone()
        messages.append(kernels.take_entries(ours, positions, form))
        assert torch.equal(messages[-1], entries.take_entries(theirs, positions, form))
        assert same_bits(ours, theirs)
    ours, theirs = torch.full((2, numel), float("nan"))
    kernels.mean_of_entries(ours, messages, form)
    entries.mean_of_entries(theirs, messages, form)
    assert same_bits(ours, theirs)


def test_a_native_selection_by_rows_equals_its_twin() -> None:
    values = torch.randn(50, 1000) * torch.logspace(-20, 20, 50)[:, None]
    for count in (1, 10, 999, 1000):
        assert torch.equal(kernels.select_largest(values, count), twins.select_largest(values, count))


SHAPES = [(1, 1), (33, 70), (6, 4), (7, 515), (1027, 1030)]


def some_matrices(factors: int) -> tuple[list[Matrix], int]:
    """Of many shapes, with something between them; and how many values there are."""
    matrices, at = [], 3
    for rows, columns in SHAPES:
        matrices.append(Matrix(at, rows, columns, min(factors, rows, columns)))
        at += rows * columns + 5
    return matrices, at


@pytest.mark.parametrize("factors", [1, 2, 3, 8, 9])
def test_native_products_equal_their_twins(factors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not bit for bit: torch does not say in which order it adds."""
    assert kernels.native is not None
    generator = torch.Generator().manual_seed(factors)
    matrices, numel = some_matrices(factors)
    values = torch.randn(numel, generator=generator)
    starts, lefts, rights = (
        torch.randn(low_rank.numel_of(shapes), generator=generator) / 32
        for shapes in (right_shapes(matrices), left_shapes(matrices), right_shapes(matrices))
    )

    def all_of_them() -> list[Tensor]:
        left_over, out = values.clone(), values.clone()
        made = [low_rank.times_rights(values, matrices, starts), low_rank.take_rights(left_over, matrices, lefts)]
        low_rank.write_products(out, matrices, lefts, rights)
        return [*made, left_over, out]

    ours = all_of_them()
    monkeypatch.setattr(kernels, "native", None)
    for mine, theirs in zip(ours, all_of_them(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=3e-4)
        assert mine.shape == theirs.shape


def test_what_factors_say_is_in_their_matrices_and_nowhere_else() -> None:
    matrices, numel = some_matrices(2)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    lefts = low_rank.times_rights(values, matrices, torch.ones(low_rank.numel_of(right_shapes(matrices))))
    low_rank.orthonormalize(lefts, left_shapes(matrices))
    left_over, said = values.clone(), torch.zeros(numel)
    rights = low_rank.take_rights(left_over, matrices, lefts)
    low_rank.write_products(said, matrices, lefts, rights)
    torch.testing.assert_close(left_over + said, values)
    between = torch.ones(numel, dtype=torch.bool)
    for matrix, left in zip(matrices, low_rank.pieces(lefts, left_shapes(matrices)), strict=True):
        matrix.of(between).fill_(False)
        expected = left.T @ (left @ matrix.of(values))
        torch.testing.assert_close(matrix.of(said), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(left_over[between], values[between])
    assert not said[between].any()


@pytest.mark.parametrize("length", [1, 5, 64, 2501])
def test_native_orthonormal_rows_are_those_of_the_twin_to_the_last_bit_but_one(length: int) -> None:
    """Sums in double precision differ in order, which may turn the last rounding to float32."""
    assert kernels.native is not None
    generator = torch.Generator().manual_seed(length)
    whole, lacking = torch.randn(1, length, generator=generator), torch.randn(4, length, generator=generator)
    lacking[2] = 0
    shapes = [(1, length), (4, length)]
    flat = torch.cat([whole.view(-1), lacking.view(-1)])
    assert not low_rank.orthonormalize(flat, shapes)
    ours = low_rank.pieces(flat, shapes)
    assert low_rank.orthonormalize_rows(whole)
    assert not low_rank.orthonormalize_rows(lacking)
    assert low_rank.orthonormalize(ours[0].clone().view(-1), shapes[:1])
    for mine, theirs in zip(ours, [whole, lacking], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-7, atol=1e-12)
    if length > 3:
        expected = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0]))
        torch.testing.assert_close(ours[1] @ ours[1].T, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 1023, 4099])
def test_native_halves_are_those_of_the_twin(numel: int, dtype: torch.dtype) -> None:
    assert kernels.native is not None
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 10 ** torch.empty(numel).uniform_(-9, 6, generator=generator)
    halves = kernels.narrow(values, dtype)
    assert torch.equal(halves, twins.narrow(values, dtype))
    saturated = kernels.narrow(values, dtype, saturates=True)
    assert torch.equal(saturated, twins.narrow(values, dtype, saturates=True))
    assert torch.equal(saturated, halves.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max))
    ours, theirs = torch.empty(numel), torch.empty(numel)
    kernels.widen(ours, halves)
    twins.widen(theirs, halves)
    assert torch.equal(ours, theirs)
