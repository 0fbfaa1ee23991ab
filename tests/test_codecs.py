"""The laws of codecs, over every one of them, without any network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from syncline.codecs.codec import Codec, Part, Place, State
from syncline.codecs.conversation import talk
from syncline.codecs.registry import CODECS, codec_of, text_of_codec

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
    "topk:1.0",
    "randomk:0.1",
    "randomk:0.1,scaled=true,feedback=false",
    "powersgd:1",
    "powersgd:2",
    "powersgd:4,min_compression_rate=1",
    "dgc:0.01",
    "dgc:0.1,nesterov=true,values=fp16",
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
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_ends_with_the_same_bits(text: str, length: int, world: int) -> None:
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
    for step in range(400):
        ranks.reduce(gradients_of(3, ranks.numel, step % 7))
        norms.append(max(float(kept.norm()) for kept in ranks.kept))
    assert max(norms[300:]) <= 2.0 * max(norms[100:200]) + 1e-6


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
