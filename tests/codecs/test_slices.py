"""The one-shot exchange: what its two codings lose comes back where it was lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.codec_cases import flat_parts
from syncline.codecs.codec import Codec, ReduceContext
from syncline.codecs.conversation import talk
from syncline.codecs.registry import codec_of
from syncline.codecs.slices import slice_bounds

CODECS = ["int8", "int4", "onebit", "fp16:feedback=true"]


def said(codec: Codec, values: Tensor) -> Tensor:
    """What a message says of values: in a world of one they are coded once."""
    (decoder,) = talk([codec.reduce(values.clone(), {}, ReduceContext(0, 1, 0, 0, flat_parts(len(values))))])
    out = torch.empty_like(values)
    decoder(out)
    return out


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_owner_adds_its_own_values_as_they_are_and_keeps_what_its_mean_lacks(text: str, world: int) -> None:
    codec, numel = codec_of(text), 1000
    generator = torch.Generator().manual_seed(world)
    gradients = [torch.randn(numel, generator=generator) for _ in range(world)]
    kept = [gradient.clone() for gradient in gradients]
    places = [ReduceContext(rank, world, 0, 0, flat_parts(numel)) for rank in range(world)]
    decoders = talk([codec.reduce(values, {}, place) for values, place in zip(kept, places, strict=True)])
    mean = torch.empty(numel)
    decoders[0](mean)
    bounds = slice_bounds(numel, world, getattr(codec, "block", 1))
    for owner in range(world):
        slice_ = slice(bounds[owner], bounds[owner + 1])
        total = gradients[owner][slice_].clone()
        for rank in range(world):
            if rank != owner:
                spoken = said(codec, gradients[rank][slice_])
                torch.testing.assert_close(kept[rank][slice_], gradients[rank][slice_] - spoken)
                total += spoken
        torch.testing.assert_close(kept[owner][slice_], total - world * mean[slice_], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mean[slice_], said(codec, total / world), atol=1e-5, rtol=1e-5)
