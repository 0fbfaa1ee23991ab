"""The stages of a bucket, as data: what is done with it, by whom and in which order, and how many bytes that takes.

    no codec           fill ready                    wire                           status
    one question       fill ready encode             wire              decode       status commit
    two questions      fill ready encode             wire combine wire decode       status commit
    lean               fill ready encode             wire combine                   status commit decode
    first of a host    fill ready encode sum encode  wire decode spread decode      status commit
    others of a host   fill ready encode sum                    spread decode      status commit

The path runs what a list says, and each stage leaves a stamp of its name. A list is made by a pure function, without a
fabric, so it can be priced before anything runs. The status is that of the whole pass: it leaves when every bucket has
begun the stage that settles it, because from then on nothing can go wrong on one rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from syncline.codecs.codec import Codec
from syncline.codecs.conversation import Declaration
from syncline.codecs.none import NoCodec
from syncline.collectives.schedule import Hosts
from syncline.core.parts import Part, numel_of

StageName = Literal["fill", "ready", "encode", "sum", "wire", "combine", "decode", "spread", "status", "commit"]
Resource = Literal["user", "codec", "channel", "host"]
WORD_BYTES = 8  # messages of gathers and exchanges are whole words


class Stage(NamedTuple):
    """One thing that is done with a bucket."""

    name: StageName
    resource: Resource  # the user's threads, that of the codec, a channel between those who talk, or inside a host
    nbytes: int = 0  # that are worked on; on the wire, what this rank hands to the collective
    question: Declaration | None = None  # that is answered on the wire
    number: int = 0  # of that question; each has a channel of its own
    collective: str = ""  # that answers a mean; gathers and exchanges have one way only
    settles: bool = False  # when it has begun, nothing can go wrong on this rank alone any more


@dataclass(frozen=True)
class Route:
    """Between whom buckets travel, and how: the same for all buckets of a run."""

    world: int
    rank: int = 0
    hosts: Hosts = ()  # whose first ranks talk for the others; empty where all ranks talk
    collective: str = "auto"  # of what is sent uncompressed: "engine", "auto", or an algorithm
    collective_of_halves: str = "direct"  # 16-bit values go straight to their owners, as no partial sum of them may

    @property
    def talkers(self) -> int:
        """How many ranks talk through the codec."""
        return len(self.hosts) or self.world

    @property
    def talks(self) -> bool:
        """Whether this rank does."""
        return not self.hosts or self.rank in self._leaders

    @property
    def talker(self) -> int:
        """The rank of this one among those who talk, if it does."""
        return self._leaders.index(self.rank) if self.hosts else self.rank

    @property
    def _leaders(self) -> list[int]:
        return [host[0] for host in self.hosts]


def stages_of(
    codec: Codec,
    parts: Sequence[Part],
    dtype: torch.dtype,
    step: int,
    route: Route,
    lean: bool = False,
) -> tuple[Stage, ...]:
    """The stages of a bucket with these parameters, on one rank, in a step that comes after `step - 1` good ones."""
    numel = numel_of(parts)
    bucket_bytes = dtype.itemsize * numel
    status = Stage("status", "channel", 4 * (1 + len(parts)))
    filled = [Stage("fill", "user", bucket_bytes), Stage("ready", "user")]
    if is_plain(codec):
        dense = Declaration("mean", (bucket_bytes,), dtype.itemsize)
        wire = Stage("wire", "channel", bucket_bytes, dense, 0, route.collective, settles=True)
        return *filled, wire, status
    nbytes = 4 * numel  # of values in float32
    keeps_in_bucket = lean and codec.feedback and dtype == torch.float32
    questions = codec.questions(parts, route.talkers, step) if route.talks and route.world > 1 else ()
    encode, decode = Stage("encode", "codec", nbytes), Stage("decode", "codec", nbytes)
    talk = conversation_stages(questions, route)
    if route.hosts:
        ends = [decode] if route.talks else []
        begins = [encode] if route.talks else []
        talk = [Stage("sum", "host", nbytes), *begins, *talk, *ends, Stage("spread", "host", nbytes)]
    elif keeps_in_bucket and talk:
        talk.append(combine_after(talk[-1]))
    commit = Stage("commit", "codec", nbytes if keeps_in_bucket else 0)
    behind = [status, commit, decode] if keeps_in_bucket else [decode, status, commit]
    if not any(stage.settles for stage in talk):
        behind[0] = behind[0]._replace(settles=True)
    return *filled, encode, *talk, *behind


def is_plain(codec: Codec) -> bool:
    """Whether buckets go as they are, and nothing is kept."""
    return isinstance(codec, NoCodec) and not codec.feedback


def conversation_stages(questions: Sequence[Declaration], route: Route) -> list[Stage]:
    """The wire of every question, and between two of them what the codec makes of the answer."""
    stages: list[Stage] = []
    for number, question in enumerate(questions):
        if stages:
            stages.append(combine_after(stages[-1]))
        settles = number == len(questions) - 1 and not route.hosts
        stages.append(wire_stage(question, number, route)._replace(settles=settles))
    return stages


def wire_stage(question: Declaration, number: int, route: Route) -> Stage:
    """The collective that answers a question. Messages have one length on all ranks: that of the longest."""
    if question.kind == "mean":
        collective = route.collective_of_halves if question.is_mean_of_halves else route.collective
        return Stage("wire", "channel", question.largest, question, number, collective)
    whole = -(-question.largest // WORD_BYTES) * WORD_BYTES
    nbytes = whole * len(question.sizes) if question.kind == "exchange" else whole
    return Stage("wire", "channel", nbytes, question, number)


def combine_after(wire: Stage) -> Stage:
    """What a codec does with an answer: as much as all ranks have sent for this one."""
    messages = len(wire.question.sizes) if wire.question is not None and wire.question.kind == "gather" else 1
    return Stage("combine", "codec", messages * wire.nbytes)
