"""How a bucket gets smaller and whole again; one page per codec. A codec never communicates: it asks."""

from __future__ import annotations

from syncline.codecs.codec import Codec
from syncline.codecs.composed import Rules, Warmup
from syncline.codecs.dgc import DGC
from syncline.codecs.half import Bf16, Fp16
from syncline.codecs.none import NoCodec
from syncline.codecs.onebit import OneBit
from syncline.codecs.powersgd import PowerSGD
from syncline.codecs.quantized import Int4, Int8
from syncline.codecs.randomk import RandomK
from syncline.codecs.topk import TopK

__all__ = [
    "DGC",
    "Bf16",
    "Codec",
    "Fp16",
    "Int4",
    "Int8",
    "NoCodec",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "Rules",
    "TopK",
    "Warmup",
]
