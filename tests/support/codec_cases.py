"""Settings of every codec, what they are tried on, and all ranks of a world without any network."""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.codecs.conversation import talk
from syncline.codecs.registry import codec_of
from syncline.core.parts import Part
from syncline.path.codec_state import BucketCodecState

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
    "dgc:0.1,momentum=0",
    "dgc:0.1,masking=true",
    "rules:codec=(dgc:0.1),below=100",
    "warmup:codec=(topk:0.1),steps=3",
    "warmup:codec=(powersgd:2),steps=1",
    "rules:codec=(topk:0.1,values=int8),below=100",
    "rules:codec=(powersgd:1),below=0,vectors=false,names=layer.0|*.3",
    "rules:codec=(warmup:steps=3,codec=(topk:0.1)),below=4",
)


def sends_gradients(text: str) -> bool:
    """Not momenta, which come to more."""
    correction = codec_of(text).correction
    return correction is None or not correction.momentum


FED_BACK = tuple(text for text in SETTINGS if codec_of(text).feedback and sends_gradients(text))
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
        self.coded = [BucketCodecState.begin(codec, parts, torch.device("cpu"), feedback=False) for _ in range(world)]
        self.kept = [torch.zeros(self.numel) for _ in range(world)]  # of gradients of the loss itself
        self.step = 0
        self.loss_scale = 1.0

    @property
    def states(self) -> list[State]:
        return [coded.state for coded in self.coded]

    def reduce(self, gradients: list[Tensor]) -> list[Tensor]:
        """What each rank ends with."""
        where = (self.step, self.seed, self.parts, self.loss_scale)
        places = [ReduceContext(rank, self.world, *where) for rank in range(self.world)]
        values = [gradient.clone() for gradient in gradients]
        for value, coded, place in zip(values, self.coded, places, strict=True):
            coded.state |= coded.correct(value, place)
        if self.codec.feedback:
            values = [value + self.loss_scale * kept for value, kept in zip(values, self.kept, strict=True)]
        conversations = [
            self.codec.reduce(value, state, place)
            for value, state, place in zip(values, self.states, places, strict=True)
        ]
        decoders = talk(conversations)
        self.step += 1
        if self.codec.feedback:
            self.kept = [value / self.loss_scale for value in values]
        means = [torch.full((self.numel,), float("nan")) for _ in range(self.world)]
        for decode, mean in zip(decoders, means, strict=True):
            decode(mean)
        return means


def gradients_of(world: int, numel: int, step: int) -> list[Tensor]:
    """Other ones on every rank and in every step, with some in common so that there is something to learn."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(step))
    generator = torch.Generator().manual_seed(1000 + step)
    return [common + torch.randn(numel, generator=generator) for _ in range(world)]
