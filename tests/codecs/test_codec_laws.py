"""The laws of codecs, over every one of them, without any network."""

from __future__ import annotations

import pytest
import torch

from support.codec_cases import FED_BACK, LENGTHS, SETTINGS, SHAPES, Ranks, flat_parts, gradients_of, parts_of
from syncline.codecs.registry import CODECS, codec_of, text_of_codec
from syncline.errors import ConfigError, PairingError, UnknownName


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


@pytest.mark.sampled(8)
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
        ("powersgd:4,min_compression_rate=nan", ConfigError, "min_compression_rate=nan"),
        ("powersgd:4,min_compression_rate=0.5", ConfigError, "try min_compression_rate=2"),
        ("dgc:0.1,momentum=1", ConfigError, "momentum=1.0"),
        ("dgc:0.1,clip=-1", ConfigError, "clip=-1.0"),
        ("dgc:0.1,clip=nan", ConfigError, "clip=nan"),
        ("dgc:0.1,warmup=-5", ConfigError, "warmup=-5"),
        ("randomk:1e-300", ConfigError, "keep=1e-300"),
        ("rules:codec=(nonsense)", UnknownName, "nonsense"),
        ("rules:codec=(topk:7)", ConfigError, "keep=7.0"),
        ("rules:codec=()", UnknownName, "known"),
        ("warmup:codec=(rules:codec=(topk:7))", ConfigError, "keep=7.0"),
        ("rules:codec=(topk:0.1", ConfigError, "brackets"),
        ("topq:0.1", UnknownName, "topk"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_try(text: str, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        codec_of(text)


@pytest.mark.parametrize("given", [None, 5, type(codec_of("topk:0.01"))])
def test_what_is_no_codec_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"neither a text nor a Codec; try 'none'"):
        codec_of(given)
