"""Native kernels against the reference kernels in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.extreme_values import KINDS, LENGTHS, extreme_values
from support.references import same_bits
from syncline.codecs import entries, kernels, low_rank
from syncline.codecs.entries import FORMS
from syncline.codecs.kernels import reference
from syncline.codecs.low_rank import Matrix, left_shapes, right_shapes

extremes = st.builds(
    extreme_values,
    st.sampled_from(list(KINDS)),
    st.sampled_from(LENGTHS) | st.integers(0, 20_000),
    st.integers(0, 2**32),
)
blocks = st.sampled_from([8, 16, 24, 64, 256, 1000, 16_384])


def assert_decoded(decode: Callable[..., None], wanted: Tensor) -> None:
    """Written, added and subtracted."""
    start = torch.arange(float(len(wanted)))
    for how, combine in kernels.HOWS.items():
        out = start.clone()
        decode(out=out, how=how)
        assert same_numbers(out, combine(start.clone(), wanted))


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Equal bits but for those of NaN, which comes of infinite scales: processors disagree about its sign."""
    return same_bits(one.where(~one.isnan(), 0.0), other.where(~other.isnan(), 0.0)) and torch.equal(
        one.isnan(), other.isnan()
    )


@given(extremes, blocks, st.sampled_from([8, 4]), st.booleans(), st.integers(0, 2**32))
def test_native_integers_have_the_bits_of_the_reference(
    values: Tensor, block: int, bits: int, is_random: bool, seed: int
) -> None:
    assert kernels.native is not None
    noise = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) if is_random else None
    left = values.clone()
    message = kernels.take_quantized(left, block, bits, noise)
    assert torch.equal(message, reference.quantize(values, block, bits, noise))
    decoded = reference.dequantize(message, len(values), block, bits)
    assert same_numbers(left, values - decoded)
    assert_decoded(partial(kernels.dequantize, message, block=block, bits=bits), decoded)


@given(extremes, blocks.filter(lambda block: block % 8 == 0))
def test_native_signs_and_scales_have_the_bits_of_the_reference(values: Tensor, block: int) -> None:
    assert kernels.native is not None
    left = values.clone()
    message = kernels.take_signs(left, block)
    assert torch.equal(message, reference.pack_signs(values, block))
    decoded = reference.unpack_signs(message, len(values), block)
    assert same_numbers(left, values - decoded)
    assert_decoded(partial(kernels.unpack_signs, message, block=block), decoded)


@pytest.mark.parametrize("block", [8, 16, 24, 64, 512, 4096])
def test_scales_that_hang_on_the_order_of_additions_are_those_of_the_reference(block: int) -> None:
    """Means of blocks lie between two 16-bit floats, as exactly as can be, so that the last bit of a sum decides."""
    assert kernels.native is not None
    rows = 0.5 + torch.rand(1000, block, generator=torch.Generator().manual_seed(block), dtype=torch.float32)
    others = rows[:, :-1].double().sum(1)
    between = ((others / block + 0.1) * 128).floor() / 128 + 1 / 256
    rows[:, -1] = between * block - others
    values = (rows * torch.where(torch.arange(block) % 3 == 0, -1.0, 1.0)).view(-1)
    assert torch.equal(kernels.take_signs(values.clone(), block), reference.pack_signs(values, block))


@given(extremes, st.integers(1, 5), st.floats(0, 1))
def test_native_selections_equal_the_reference_also_among_equals(values: Tensor, rows: int, density: float) -> None:
    assert kernels.native is not None
    columns = len(values) // rows
    matrix = values[: rows * columns].view(rows, columns)
    for count in {min(columns, 1), round(density**3 * columns), columns}:
        chosen = kernels.select_largest(matrix, count)
        assert torch.equal(chosen, reference.select_largest(matrix, count))
        assert len(chosen) == rows * count


def test_of_equal_magnitudes_the_first_are_selected() -> None:
    values = torch.tensor([1.0, -2.0, 2.0, 0.5, -2.0, 2.0, 3.0])
    for select in (kernels.select_largest, reference.select_largest):
        assert select(values, 3).tolist() == [1, 2, 6]


@given(
    st.sampled_from(FORMS),
    st.sampled_from(list(KINDS)),
    st.integers(0, 2**32),
    st.integers(0, 70_000),
    st.floats(0, 1),
    st.integers(1, 5),
)
def test_native_messages_and_means_equal_the_reference(
    form: str, kind: str, seed: int, numel: int, density: float, world: int
) -> None:
    assert kernels.native is not None
    generator = torch.Generator().manual_seed(seed)
    messages = []
    for _ in range(world):
        values = KINDS[kind](numel, generator)
        positions = (torch.rand(numel, generator=generator) < density**4).nonzero().view(-1)
        ours, theirs = values.clone(), values.clone()
        messages.append(kernels.take_entries(ours, positions, form))
        assert torch.equal(messages[-1], entries.take_entries(theirs, positions, form))
        assert same_numbers(ours, theirs)
    ours, theirs = torch.full((2, numel), float("nan"))
    kernels.mean_of_entries(ours, messages, form)
    entries.mean_of_entries(theirs, messages, form)
    assert same_numbers(ours, theirs)


SHAPES = [(1, 1), (33, 70), (6, 4), (7, 515), (1027, 1030)]


def some_matrices(factors: int) -> tuple[list[Matrix], int]:
    """Of many shapes, with something between them; and how many values there are."""
    matrices, at = [], 3
    for rows, columns in SHAPES:
        matrices.append(Matrix(at, rows, columns, min(factors, rows, columns)))
        at += rows * columns + 5
    return matrices, at


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e15])
@pytest.mark.parametrize("factors", [1, 2, 3, 8, 9])
def test_native_products_are_those_of_the_reference_within_what_rounding_does(
    factors: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not bit for bit, because torch does not say in which order it adds; but no further than `low_rank.py` says."""
    assert kernels.native is not None
    generator = torch.Generator().manual_seed(factors)
    matrices, numel = some_matrices(factors)
    values = torch.randn(numel, generator=generator) * scale
    starts, lefts, rights = (
        torch.randn(low_rank.numel_of(shapes), generator=generator) / 32
        for shapes in (right_shapes(matrices), left_shapes(matrices), right_shapes(matrices))
    )

    def all_of_them() -> list[Tensor]:
        out = values.clone()
        made = [low_rank.times_rights(values, matrices, starts), low_rank.take_rights(values.clone(), matrices, lefts)]
        low_rank.write_products(out, matrices, lefts, rights)
        return [*made, out]

    ours = all_of_them()
    monkeypatch.setattr(kernels, "native", None)
    sizes = [
        low_rank.times_rights(values.abs(), matrices, starts.abs()),
        low_rank.take_rights(values.abs(), matrices, lefts.abs()),
        torch.zeros(numel),
    ]
    low_rank.write_products(sizes[-1], matrices, lefts.abs(), rights.abs())
    terms = [max(columns for _, columns in SHAPES), max(rows for rows, _ in SHAPES), factors]
    for mine, theirs, size, n in zip(ours, all_of_them(), sizes, terms, strict=True):
        assert mine.shape == theirs.shape
        assert ((mine - theirs).abs().double() <= 2 * n * 2.0**-24 * size.double() + n * 2.0**-149).all()


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
def test_native_orthonormal_rows_are_those_of_the_reference_to_the_last_bit_but_one(length: int) -> None:
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


@given(extremes, st.sampled_from([torch.float16, torch.bfloat16]))
def test_native_halves_are_those_of_the_reference(values: Tensor, dtype: torch.dtype) -> None:
    assert kernels.native is not None
    halves = kernels.narrow(values, dtype)
    assert same_bits(halves, reference.narrow(values, dtype))
    saturated = kernels.narrow(values, dtype, saturates=True)
    assert same_bits(saturated, reference.narrow(values, dtype, saturates=True))
    assert same_bits(saturated, halves.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max))
    ours, theirs = torch.empty_like(values), torch.empty_like(values)
    kernels.widen(ours, halves)
    reference.widen(theirs, halves)
    assert same_bits(ours, theirs)
