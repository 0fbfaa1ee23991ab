"""Every codec by name: `"topk:0.01,values=int8"` is `TopK(0.01, values="int8")`."""

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
from syncline.errors import ConfigError
from syncline.specs import parse, text_of

CODECS: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (NoCodec, Fp16, Bf16, Int8, Int4, OneBit, TopK, RandomK, PowerSGD, DGC, Warmup, Rules)
}


def codec_of(given: str | Codec) -> Codec:
    """The codec that was given or named."""
    if isinstance(given, str):
        return parse("codec", given, CODECS)
    if not isinstance(given, Codec):
        raise ConfigError(f"codec={given!r} is neither a text nor a Codec; try 'none', or 'topk:0.01'")
    return given


def text_of_codec(codec: Codec) -> str:
    """The text that `codec_of` reads back."""
    return text_of(codec.name, codec)
