"""The laws of codecs, over every one of them, without any network."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import same_bits
from torch import Tensor

from syncline.codecs import entries, kernels, twins
from syncline.codecs.codec import Codec, Part, Place, State
from syncline.codecs.conversation import talk
from syncline.codecs.entries import FORMS, read_message, write_message
from syncline.codecs.indices import decode_indices, encode_indices, way_of
from syncline.codecs.registry import CODECS, codec_of, text_of_codec
from syncline.codecs.topk import select_sampled
from syncline.errors import ConfigError, CorruptMessage, PairingError, UnknownName

SETTINGS = (
    "none",
    "fp16",
    "fp16:feedback=true",
    "bf16",
    "bf16:feedback=true",
    "int8",
    "int8:rounding=stochastic",
    "int8:block=8,feedback=false",
    "int4",
    "int4:rounding=stochastic",
    "onebit",
    "onebit:block=64",
    "onebit:vote=true,feedback=false",
    "topk:0.01",
    "topk:0.1,values=fp16",
    "topk:0.1,values=int8",
    "topk:0.05,select=sampled",
    "topk:0.1,block=64",
    "topk:0.05,block=4100,select=sampled,values=fp16",
    "topk:1.0",
    "randomk:0.1",
    "randomk:0.1,scaled=true,feedback=false",
    "powersgd:1",
    "powersgd:2",
    "powersgd:4,min_compression_rate=1",
    "dgc:0.01",
    "dgc:0.1,nesterov=true,values=fp16",
    "warmup:codec=(topk:0.1),steps=3",
    "warmup:codec=(powersgd:2),steps=1",
    "rules:codec=(topk:0.1,values=int8),below=100",
    "rules:codec=(powersgd:1),below=0,vectors=false,names=layer.0|*.3",
)
FED_BACK = tuple(text for text in SETTINGS if codec_of(text).feedback)
LENGTHS = (0, 1, 7, 4096, 65_537)
SHAPES = ((64, 32), (32,), (16, 8, 3), (64, 32), (5,), ())


def parts_of(shapes: tuple[tuple[int, ...], ...]) -> tuple[Part, ...]:
    parts, start = [], 0
    for number, shape in enumerate(shapes):
        size = torch.Size(shape)
        parts.append(Part(f"layer.{number}", start, start + size.numel(), size))
        start += size.numel()
    return tuple(parts)


def flat_parts(length: int) -> tuple[Part, ...]:
    return parts_of(((length,),))


class Ranks:
    """All ranks of a world, with error feedback as the law has it."""

    def __init__(self, codec: Codec, world: int, parts: tuple[Part, ...], seed: int = 0) -> None:
        self.codec, self.world, self.parts, self.seed = codec, world, parts, seed
        self.numel = parts[-1].hi if parts else 0
        self.states: list[State] = [codec.start(parts, torch.device("cpu")) for _ in range(world)]
        self.kept = [torch.zeros(self.numel) for _ in range(world)]
        self.step = 0

    def reduce(self, gradients: list[Tensor]) -> list[Tensor]:
        """What each rank ends with."""
        places = [Place(rank, self.world, self.step, self.seed, self.parts) for rank in range(self.world)]
        values = [gradient.clone() for gradient in gradients]
        if self.codec.feedback:
            values = [value + kept for value, kept in zip(values, self.kept, strict=True)]
        conversations = [
            self.codec.reduce(value, state, place)
            for value, state, place in zip(values, self.states, places, strict=True)
        ]
        decoders = talk(conversations)
        self.step += 1
        if self.codec.feedback:
            self.kept = values
        means = [torch.full((self.numel,), float("nan")) for _ in range(self.world)]
        for decode, mean in zip(decoders, means, strict=True):
            decode(mean)
        return means


def gradients_of(world: int, numel: int, step: int) -> list[Tensor]:
    """Other ones on every rank and in every step, with some in common so that there is something to learn."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(step))
    generator = torch.Generator().manual_seed(1000 + step)
    return [common + torch.randn(numel, generator=generator) for _ in range(world)]


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_ends_with_the_same_bits(text: str, world: int) -> None:
    for length in LENGTHS if world == 3 else LENGTHS[:3]:
        ranks = Ranks(codec_of(text), world, flat_parts(length))
        for step in range(2):
            first, *others = ranks.reduce(gradients_of(world, length, step))
            assert not first.isnan().any()
            assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("text", FED_BACK)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("shapes", [SHAPES, ((1,),), ((4097,),)])
def test_what_was_sent_plus_what_was_kept_is_the_gradient(text: str, world: int, shapes: tuple) -> None:
    ranks = Ranks(codec_of(text), world, parts_of(shapes))
    sent = torch.zeros(ranks.numel, dtype=torch.float64)
    wanted = torch.zeros(ranks.numel, dtype=torch.float64)
    for step in range(12):
        gradients = gradients_of(world, ranks.numel, step)
        sent += ranks.reduce(gradients)[0].double()
        wanted += torch.stack(gradients).double().mean(0)
    kept = torch.stack(ranks.kept).double().mean(0)
    assert (sent + kept - wanted).norm() <= 3e-6 * 12 * wanted.norm() + 1e-5


@pytest.mark.parametrize("text", FED_BACK)
def test_what_is_kept_stays_bounded(text: str) -> None:
    ranks = Ranks(codec_of(text), 3, parts_of(SHAPES))
    norms = []
    for step in range(200):
        ranks.reduce(gradients_of(3, ranks.numel, step % 7))
        norms.append(max(float(kept.norm()) for kept in ranks.kept))
    assert max(norms[150:]) <= 1.6 * max(norms[50:100]) + 1e-6


@pytest.mark.parametrize("text", SETTINGS)
def test_nothing_in_nothing_out(text: str) -> None:
    if "vote" in text:
        return
    ranks = Ranks(codec_of(text), 3, parts_of(SHAPES))
    for _ in range(2):
        for mean in ranks.reduce([torch.zeros(ranks.numel)] * 3):
            assert not mean.any()


@pytest.mark.parametrize("text", SETTINGS)
def test_text_and_settings_are_the_same_thing(text: str) -> None:
    codec = codec_of(text)
    assert codec_of(text_of_codec(codec)) == codec
    assert type(codec) is CODECS[text.partition(":")[0]]


# Settings


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("topk:0", ConfigError, "keep=0.0"),
        ("topk:1.5", ConfigError, "keep=1.5"),
        ("topk:0.1,values=int3", UnknownName, "int3"),
        ("topk:0.1,select=all", UnknownName, "all"),
        ("topk:0.01,block=50", ConfigError, "try block=100"),
        ("topk:0.01,block=-1", ConfigError, "try block=100"),
        ("randomk:0.1,scaled=true", PairingError, "would diverge"),
        ("randomk:0.1,feedback=false", PairingError, "biased"),
        ("onebit:vote=true", PairingError, "feedback=false"),
        ("onebit:feedback=false", PairingError, "do not converge"),
        ("int8:block=7", ConfigError, "multiple of 8"),
        ("int8:rounding=up", UnknownName, "up"),
        ("powersgd:0", ConfigError, "rank=0"),
        ("dgc:0.1,momentum=1", ConfigError, "momentum=1.0"),
        ("topq:0.1", UnknownName, "topk"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_try(text: str, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        codec_of(text)


# What each codec promises


def test_half_precision_sums_in_fp32_and_divides_before_it_rounds() -> None:
    ranks = Ranks(codec_of("fp16"), 8, flat_parts(3))
    assert torch.equal(ranks.reduce([torch.full((3,), 20000.0)] * 8)[0], torch.full((3,), 20000.0))
    tiny = ranks.reduce([torch.full((3,), 6e-8)] * 8)[0]
    assert torch.equal(tiny, torch.full((3,), 6e-8).half().float())


@pytest.mark.parametrize("text", ["int8:feedback=false", "int4:feedback=false"])
def test_the_error_of_integers_does_not_grow_with_the_number_of_ranks(text: str) -> None:
    errors = []
    for world in (2, 16):
        gradients = gradients_of(world, 50_000, 0)
        exact = torch.stack(gradients).mean(0)
        found = Ranks(codec_of(text), world, flat_parts(50_000)).reduce(gradients)[0]
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[1] < 1.3 * errors[0]


def test_stochastic_rounding_is_right_on_average_and_differs_by_rank() -> None:
    value = torch.full((80_000,), 0.3)
    value[::8] = 1.0
    ranks = Ranks(codec_of("int8:rounding=stochastic,feedback=false,block=8"), 2, flat_parts(80_000))
    mean = ranks.reduce([value, value])[0]
    assert float(mean[value == 0.3].mean()) == pytest.approx(0.3, abs=2e-4)
    nearest = Ranks(codec_of("int8:feedback=false,block=8"), 2, flat_parts(80_000)).reduce([value, value])[0]
    assert abs(float(nearest[value == 0.3].mean()) - 0.3) > 5e-4
    codec = codec_of("int8:rounding=stochastic,feedback=false,block=8")
    drawn = [codec.encode(value, 0, Place(rank, 2, 0, 0, flat_parts(80_000))) for rank in range(2)]
    assert not torch.equal(*drawn)


def test_a_vote_is_the_sign_of_the_majority_and_ties_go_up() -> None:
    votes = [torch.tensor([1.0, -2.0, 0.0, -1.0]), torch.tensor([3.0, -1.0, 5.0, 1.0])]
    ranks = Ranks(codec_of("onebit:vote=true,feedback=false"), 2, flat_parts(4))
    assert torch.equal(ranks.reduce(votes)[0], torch.tensor([1.0, -1.0, 1.0, 1.0]))


def test_random_entries_are_the_same_on_all_ranks_and_others_in_every_step() -> None:
    ranks = Ranks(codec_of("randomk:0.1"), 3, flat_parts(1000))
    first = ranks.reduce(gradients_of(3, 1000, 0))[0]
    second = ranks.reduce(gradients_of(3, 1000, 1))[0]
    assert int((first != 0).sum()) == int((second != 0).sum()) == 100
    assert not torch.equal(first != 0, second != 0)


def test_scaled_random_entries_are_right_on_average() -> None:
    ranks = Ranks(codec_of("randomk:0.1,scaled=true,feedback=false"), 2, flat_parts(200))
    gradients = gradients_of(2, 200, 0)
    mean = torch.stack([ranks.reduce(gradients)[0] for _ in range(3000)]).mean(0)
    assert float((mean - torch.stack(gradients).mean(0)).norm() / mean.norm()) < 0.1


def test_a_sampled_selection_has_about_the_right_size_and_no_preferred_place() -> None:
    counts = torch.zeros(10)
    for seed in range(20):
        values = torch.randn(100_000, generator=torch.Generator().manual_seed(seed))
        chosen = select_sampled(values, 1000, torch.Generator().manual_seed(seed))
        assert 700 <= len(chosen) <= 1300
        assert float(values[chosen].abs().min()) > 2.3
        counts += torch.histc(chosen.float(), 10, 0, 100_000)
    assert float(counts.max() / counts.min()) < 1.15


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
def test_a_selection_by_blocks_takes_the_largest_of_every_block(numel: int) -> None:
    codec = codec_of("topk:0.05,block=64")
    values = gradients_of(1, numel, 0)[0] * torch.arange(numel).add(1).float() ** 2
    chosen = codec.choose(values, Place(0, 1, 0, 0, flat_parts(numel)))
    expected = [
        start + twins.select_largest(block, max(1, round(0.05 * len(block))))
        for start, block in zip(range(0, numel, 64), values.split(64), strict=False)
        if numel
    ]
    assert torch.equal(chosen, torch.cat(expected) if expected else torch.zeros(0, dtype=torch.int64))


def test_a_sampled_selection_by_blocks_has_about_the_right_size_in_every_block() -> None:
    codec = codec_of("topk:0.01,block=10000,select=sampled")
    values = gradients_of(1, 205_000, 0)[0] * torch.logspace(-6, 6, 205_000)
    values[30_000:40_000] = 0.0
    values[50_000:60_000] = 1.0
    chosen = codec.choose(values, Place(0, 1, 0, 0, flat_parts(205_000)))
    counts = torch.bincount(chosen // 10_000, minlength=21)
    assert (counts[:-1] >= 70).all()
    assert (counts[:-1] <= 130).all()
    assert 35 <= int(counts[-1]) <= 65
    assert (chosen.diff() > 0).all()


def test_powersgd_is_exact_for_matrices_of_low_rank_also_for_two_of_one_shape() -> None:
    parts = parts_of(((40, 30), (40, 30), (7,)))
    matrices = [torch.outer(torch.randn(40), torch.randn(30)) * scale for scale in (1.0, 100.0)]
    gradient = torch.cat([*(matrix.flatten() for matrix in matrices), torch.arange(7.0)])
    ranks = Ranks(codec_of("powersgd:1"), 3, parts)
    for _ in range(3):
        ranks.kept = [torch.zeros(ranks.numel) for _ in range(3)]
        found = ranks.reduce([gradient] * 3)[0]
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-4)


def test_dgc_with_everything_sent_and_no_masking_is_momentum_sgd() -> None:
    ranks = Ranks(codec_of("dgc:1.0,masking=false,momentum=0.9"), 3, flat_parts(50))
    momentum = torch.zeros(50)
    for step in range(6):
        gradients = gradients_of(3, 50, step)
        momentum = 0.9 * momentum + torch.stack(gradients).mean(0)
        torch.testing.assert_close(ranks.reduce(gradients)[0], momentum, rtol=1e-5, atol=1e-5)


def test_dgc_sends_less_and_less() -> None:
    codec = codec_of("dgc:0.001,warmup=10")
    fractions = [codec.fraction(step) for step in range(12)]
    assert fractions[0] == 0.25
    assert fractions == sorted(fractions, reverse=True)
    assert fractions[10] == fractions[11] == 0.001


def test_a_warm_up_sends_everything_then_less_and_less() -> None:
    codec = codec_of("warmup:codec=(topk:0.01),steps=10")
    assert codec.at(1).name == codec.at(10).name == "none"
    kept = [codec.at(step).keep for step in range(11, 25)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0.15
    assert kept[-1] == 0.01
    with pytest.raises(ConfigError, match="warm-up of its own"):
        codec_of("warmup:codec=(dgc:0.01)")


def test_rules_send_what_they_name_as_it_is() -> None:
    codec = codec_of("rules:codec=(topk:0.01),below=10,names=*embed*|head")
    parts = [Part("a.embed.weight", 0, 100, torch.Size([10, 10])), Part("head", 0, 100, torch.Size([10, 10]))]
    parts += [Part("bias", 0, 100, torch.Size([100])), Part("tiny", 0, 4, torch.Size([2, 2]))]
    assert all(codec.is_plain(part) for part in parts)
    assert not codec.is_plain(Part("body", 0, 100, torch.Size([10, 10])))


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
def test_native_decoders_refuse_what_their_twins_refuse(form: str, spacing: int, seed: int, numel: int) -> None:
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
def test_native_decoders_refuse_any_bytes_that_their_twins_refuse(
    form: str, body: bytes, count: int, way: int, parameter: int
) -> None:
    values = torch.ones(count)
    tail = {"fp32": values.view(torch.uint8), "fp16": values.half().view(torch.uint8)}
    value_bytes = tail[form] if form in tail else twins.quantize(values, entries.BLOCK, 8, None)
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


# Native kernels against their twins


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
            message = kernels.quantize(values, block, bits, drawn)
            assert torch.equal(message, twins.quantize(values, block, bits, drawn))
            decoded = twins.dequantize(message, numel, block, bits)
            assert_decoded(partial(kernels.dequantize, message, block=block, bits=bits), decoded)
    signs = kernels.pack_signs(values, block)
    head = -(-numel // block) * 4
    theirs = twins.pack_signs(values, block)
    assert torch.equal(signs[head:], theirs[head:])
    torch.testing.assert_close(signs[:head].view(torch.float32), theirs[:head].view(torch.float32))
    assert_decoded(partial(kernels.unpack_signs, signs, block=block), twins.unpack_signs(signs, numel, block))
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
        values = torch.randn(numel, generator=generator)
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


@pytest.mark.parametrize("factors", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (6, 4), (1027, 1030)])
def test_native_products_equal_their_twins(shape: tuple[int, int], factors: int) -> None:
    """Not bit for bit: torch does not say in which order it adds."""
    assert kernels.native is not None
    generator = torch.Generator().manual_seed(factors)
    matrix = torch.randn(shape, generator=generator)
    left, right = (torch.randn(factors, length, generator=generator) for length in shape)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
    close(kernels.times_right(matrix, right), twins.times_right(matrix, right))
    close(kernels.times_left(matrix, left), twins.times_left(matrix, left))
    ours, theirs = matrix.clone(), matrix.clone()
    kernels.subtract_product(ours, left, right)
    twins.subtract_product(theirs, left, right)
    close(ours, theirs)
    kernels.write_product(ours, left, right)
    twins.write_product(theirs, left, right)
    close(ours, theirs)


@pytest.mark.parametrize("length", [1, 5, 64, 2501])
def test_native_orthonormal_rows_are_those_of_the_twin_to_the_last_bit_but_one(length: int) -> None:
    """Sums in double precision differ in order, which may turn the last rounding to float32."""
    assert kernels.native is not None
    matrix = torch.randn(4, length, generator=torch.Generator().manual_seed(length))
    matrix[2] = 0
    ours, theirs = kernels.orthonormal(matrix), twins.orthonormal(matrix)
    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=1e-12)
    if length > 3:
        expected = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0]))
        torch.testing.assert_close(ours @ ours.T, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 1023, 4099])
def test_native_halves_are_those_of_the_twin(numel: int, dtype: torch.dtype) -> None:
    assert kernels.native is not None
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 10 ** torch.empty(numel).uniform_(-9, 6, generator=generator)
    halves = kernels.narrow(values, dtype)
    assert torch.equal(halves, twins.narrow(values, dtype))
    ours, theirs = torch.empty(numel), torch.empty(numel)
    kernels.widen(ours, halves)
    twins.widen(theirs, halves)
    assert torch.equal(ours, theirs)
