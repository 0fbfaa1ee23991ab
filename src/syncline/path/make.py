"""Which path buckets take: the shortest one that does what was asked for."""

from __future__ import annotations

from collections.abc import Callable

from syncline.codecs.codec import Codec
from syncline.collectives.hierarchical import Hierarchical
from syncline.collectives.registry import algorithm
from syncline.fabric.base import Fabric
from syncline.path.answerer import Answerer, LoneAnswerer, flat_answerer
from syncline.path.coded import CodedPath
from syncline.path.hierarchical import HierarchicalAnswerer
from syncline.path.path import Path
from syncline.path.plain import PlainPath
from syncline.path.residuals import GradientScale
from syncline.path.stages import is_plain
from syncline.tracing.spans import Recorder


def make_path(
    fabric: Fabric,
    collective: str,
    recorder: Recorder,
    codec: Codec,
    seed: int,
    scale: Callable[[], GradientScale],
    lean: bool = False,
) -> Path:
    """A path for buckets; all ranks make it together."""
    if is_plain(codec):
        return PlainPath(fabric, collective, recorder)
    answerer = make_answerer(fabric, collective, codec)
    return CodedPath(fabric, collective, recorder, codec, seed, scale, answerer, lean)


def make_answerer(fabric: Fabric, collective: str, codec: Codec) -> Answerer:
    """Who answers a codec: all ranks, with `"hierarchical"` one of each host, or nobody in a world of one."""
    if fabric.world == 1:
        return LoneAnswerer()
    chosen = None if collective in ("auto", "engine") else algorithm(collective)
    if isinstance(chosen, Hierarchical):
        return HierarchicalAnswerer(fabric, chosen, codec)
    return flat_answerer(fabric, collective, codec)
