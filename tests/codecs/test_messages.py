"""Messages: positions come back, and what is corrupt is refused."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from syncline.codecs import entries, kernels
from syncline.codecs.entries import FORMS, read_message, write_message
from syncline.codecs.indices import decode_indices, encode_indices, way_of
from syncline.codecs.kernels import reference
from syncline.codecs.registry import codec_of
from syncline.errors import CorruptMessage

# Positions


@given(st.sets(st.integers(0, 299_999), max_size=300), st.integers(0, 2))
def test_positions_come_back(positions: set[int], spread: int) -> None:
    numel = 300_000
    found = torch.tensor(sorted(position >> 4 * spread for position in positions), dtype=torch.int64).unique()
    message = encode_indices(found, numel)
    assert torch.equal(decode_indices(message, len(found), numel), found)


def test_the_shortest_way_is_chosen() -> None:
    everything = torch.arange(1000)
    assert way_of(encode_indices(everything, 1000)) in ("bitmap", "rice")
    sparse = torch.arange(0, 1_000_000, 1000)
    message = encode_indices(sparse, 1_000_000)
    assert way_of(message) == "rice"
    assert 8 * len(message) / len(sparse) < 12.5
    clustered = torch.arange(60_000, 61_000)
    assert len(encode_indices(clustered, 10_000_000)) < 4000


@pytest.mark.parametrize(("spacing", "way"), [(3, "bitmap"), (900, "rice")])
@pytest.mark.parametrize("module", [entries, kernels])
def test_a_message_says_how_its_positions_were_written(module: ModuleType, spacing: int, way: str) -> None:
    message = module.take_entries(torch.ones(100_000), torch.arange(0, 100_000, spacing), "fp32")
    assert entries.positions_of(message) == way


@pytest.mark.parametrize("form", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("module", [entries, kernels])
def test_messages_may_be_filled_up_with_zeros_and_with_nothing_else(module: ModuleType, form: str) -> None:
    numel = 5000
    messages = [
        module.take_entries(torch.randn(numel), torch.arange(rank, numel, spacing), form)
        for rank, spacing in enumerate([3, 17, 900, numel])
    ]
    plain, filled = torch.empty(numel), torch.empty(numel)
    module.mean_of_entries(plain, messages, form)
    for more in (1, 8, 1000):
        longer = [torch.cat([message, message.new_zeros(more)]) for message in messages]
        module.mean_of_entries(filled, longer, form)
        assert torch.equal(filled, plain)
        longer[2][-1] = 1
        with pytest.raises(CorruptMessage):
            module.mean_of_entries(filled, longer, form)


# Corrupt messages


def corrupted(message: Tensor, chance: random.Random) -> Tensor:
    """One of the things that happen to messages."""
    broken = message.clone()
    what = chance.randrange(4)
    if what == 0:
        return broken[: chance.randrange(len(broken))]
    if what == 1:
        return torch.cat([broken, broken.new_zeros(chance.randrange(1, 20))])
    for _ in range(chance.randrange(1, 9)):
        where = chance.randrange(min(len(broken), 40) if what == 2 else len(broken))
        broken[where] = chance.randrange(256)
    return broken


@pytest.mark.parametrize("form", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("spacing", [1, 7, 900])
def test_a_corrupt_message_of_entries_is_an_error_or_entries_in_bounds(form: str, spacing: int) -> None:
    numel = 50_000
    indices = torch.arange(0, numel, spacing)
    message = write_message(indices, torch.randn(len(indices)), numel, form)
    chance = random.Random(spacing)
    refused = 0
    for _ in range(300):
        try:
            found, values = read_message(corrupted(message, chance), numel, form)
        except CorruptMessage:
            refused += 1
            continue
        assert len(found) == len(values) <= numel
        assert not len(found) or (int(found.min()) >= 0 and int(found.max()) < numel)
    assert refused > 100


def mean_or_refusal(module: ModuleType, messages: list[Tensor], numel: int, form: str) -> Tensor | None:
    """None if it was refused, and then nothing may have been written."""
    out = torch.full((numel,), 7.0)
    try:
        module.mean_of_entries(out, messages, form)
    except CorruptMessage:
        assert (out == 7.0).all()
        return None
    return out


@given(st.sampled_from(FORMS), st.sampled_from([1, 3, 40, 900]), st.integers(0, 2**32), st.integers(1, 40_000))
def test_native_decoders_refuse_what_the_reference_refuse(form: str, spacing: int, seed: int, numel: int) -> None:
    assert kernels.native is not None
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    good = entries.take_entries(values, torch.arange(numel)[seed % spacing :: spacing], form)
    chance = random.Random(seed)
    for _ in range(10):
        messages = [good, corrupted(good, chance)]
        ours, theirs = (mean_or_refusal(module, messages, numel, form) for module in (kernels, entries))
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@given(st.sampled_from(FORMS), st.binary(max_size=80), st.integers(0, 40), st.integers(0, 2), st.integers(0, 45))
def test_native_decoders_refuse_any_bytes_that_the_reference_refuse(
    form: str, body: bytes, count: int, way: int, parameter: int
) -> None:
    values = torch.ones(count)
    tail = {"fp32": values.view(torch.uint8), "fp16": values.half().view(torch.uint8)}
    value_bytes = tail[form] if form in tail else reference.quantize(values, entries.BLOCK, 8, None)
    positions = torch.tensor([way, parameter, 0, 0, 0, 0, 0, 0, *body], dtype=torch.uint8)
    message = torch.cat([torch.tensor([count, len(positions)]).view(torch.uint8), positions, value_bytes])
    for numel in (40, 8 * len(body), 100_000):
        ours, theirs = (mean_or_refusal(module, [message], numel, form) for module in (kernels, entries))
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("text", ["int8", "int4", "onebit", "fp16:feedback=true"])
def test_a_message_of_the_wrong_length_is_refused(text: str) -> None:
    codec = codec_of(text)
    for length in (0, 1, 99, 101, 5000):
        with pytest.raises(CorruptMessage):
            codec.decode(torch.zeros(length, dtype=torch.uint8), torch.zeros(1000))
