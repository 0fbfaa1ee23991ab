"""A codec declares its questions: what it asks is what it has declared, on every rank, and nothing is longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.codec_cases import SETTINGS, SHAPES, flat_parts, parts_of
from syncline.codecs.codec import Codec, ReduceContext
from syncline.codecs.conversation import Gather, Question, answers_to
from syncline.codecs.registry import CODECS, codec_of
from syncline.core.parts import Part

WORLDS = (1, 2, 3, 4, 5, 8)
BUCKETS = [*(flat_parts(length) for length in (0, 1, 7, 1031)), parts_of(SHAPES), parts_of(((7, 129), (1, 1)))]
CLUSTERED, SPREAD = "clustered", "spread"
NESTED = (
    "rules:below=100,codec=(warmup:steps=1,codec=(int8))",
    "rules:below=0,vectors=false,codec=(rules:below=300,codec=(powersgd:2))",
)


def questions_of(codec: Codec, parts: tuple[Part, ...], world: int, step: int, how: str) -> list[list[Question]]:
    """What all ranks ask, question by question."""
    contexts = [ReduceContext(rank, world, step, 0, parts) for rank in range(world)]
    numel = parts[-1].hi
    states = [codec.start(parts, torch.device("cpu")) for _ in contexts]
    for state in states:
        state |= codec.correction.start(parts, torch.device("cpu")) if codec.correction is not None else {}
    values = [values_of(numel, how, rank) for rank in range(world)]
    conversations = [codec.reduce(*given) for given in zip(values, states, contexts, strict=True)]
    asked, answers = [], [None] * world
    while True:
        questions: list[Question] = []
        for conversation, answer in zip(conversations, answers, strict=True):
            try:
                questions.append(conversation.send(answer))
            except StopIteration:
                continue
        if not questions:
            return asked
        assert len(questions) == world
        asked.append(questions)
        answers: list[Any] = answers_to(questions)


def values_of(numel: int, how: str, rank: int) -> Tensor:
    """Gradients whose large entries are all over a bucket, or side by side."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    return values.abs().sort().values if how == CLUSTERED else values


def expect_declared(codec: Codec, parts: tuple[Part, ...], world: int, step: int, how: str) -> None:
    """Compare what all ranks ask with what was declared; where it is a bound, a message may be shorter."""
    declared = codec.questions(parts, world, step)
    asked = questions_of(codec, parts, world, step, how)
    assert len(declared) == len(asked) <= codec.most_questions
    for declaration, questions in zip(declared, asked, strict=True):
        assert {question.declaration for question in questions} == {declaration}
        for rank, question in enumerate(questions):
            if isinstance(question, Gather):
                nbytes, most = question.message.nbytes, declaration.sizes[rank]
                assert nbytes <= most if declaration.is_bound else nbytes == most


@pytest.mark.parametrize("text", [*SETTINGS, *NESTED])
def test_a_codec_asks_what_it_has_declared(text: str) -> None:
    codec = codec_of(text)
    for world in WORLDS:
        for parts in BUCKETS:
            for step in (1, 5):
                expect_declared(codec, parts, world, step, SPREAD)
    for how in (SPREAD, CLUSTERED):
        expect_declared(codec, flat_parts(65_537), 2, 200, how)


@pytest.mark.parametrize("text", [*SETTINGS, *NESTED, "warmup:codec=(rules:codec=(topk:0.1)),steps=2"])
def test_questions_differ_between_phases_only(text: str) -> None:
    codec = codec_of(text)
    for parts in BUCKETS[-2:]:
        by_phase = {codec.phase(step): codec.questions(parts, 3, step) for step in range(1, 300)}
        for step in range(1, 300):
            assert codec.questions(parts, 3, step) == by_phase[codec.phase(step)]


def test_every_codec_is_tried() -> None:
    assert {codec_of(text).name for text in SETTINGS} == set(CODECS)


def test_only_messages_of_chosen_entries_are_declared_as_bounds() -> None:
    (topk,) = codec_of("topk:0.01").questions(flat_parts(65_537), 3, 1)
    assert topk.is_bound
    for text in SETTINGS:
        for declaration in codec_of(text).questions(parts_of(SHAPES), 3, 9):
            assert declaration.is_bound == (declaration.kind == "gather" and ("topk" in text or "dgc" in text))


@pytest.mark.parametrize("text", [text for text in SETTINGS if "sampled" not in text])
def test_a_bound_is_hardly_longer_than_what_is_sent(text: str) -> None:
    parts = flat_parts(200_000)
    for declaration, (question,) in zip(
        codec_of(text).questions(parts, 1, 500), questions_of(codec_of(text), parts, 1, 500, SPREAD), strict=True
    ):
        if isinstance(question, Gather) and question.has_entries:
            assert declaration.largest <= 1.03 * question.message.nbytes + 64


# Where a bucket may be cut


def reduced(codec: Codec, parts: tuple[Part, ...], values: Tensor) -> Tensor:
    """What a world of one makes of a bucket, whose parameters are where they are in it."""
    first = parts[0].lo if parts else 0
    own = tuple(part._replace(lo=part.lo - first, hi=part.hi - first) for part in parts)
    state = codec.start(own, torch.device("cpu"))
    context = ReduceContext(0, 1, 5, 0, own)
    conversation = codec.reduce(values.clone(), state, context)
    answer: Any = None
    try:
        while True:
            (answer,) = answers_to([conversation.send(answer)])
    except StopIteration as end:
        out = torch.empty_like(values)
        end.value(out)
        return out


def pieces_of(parts: tuple[Part, ...], position: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The parameters before and from an element on; one that is cut becomes two vectors."""
    before = [part._replace(hi=min(part.hi, position)) for part in parts if part.lo < position]
    behind = [part._replace(lo=max(part.lo, position)) for part in parts if part.hi > position]
    flat = [
        tuple(
            part if part.hi - part.lo == part.shape.numel() else part._replace(shape=(part.hi - part.lo,)) for part in s
        )
        for s in (before, behind)
    ]
    return flat[0], flat[1]


ALIKE = (  # what is sent of an element hangs on nothing further away than its block, or its matrix
    "none",
    "fp16",
    "fp16:feedback=true",
    "bf16",
    "int8",
    "int4",
    "onebit",
    "onebit:vote=true,feedback=false",
    "topk:0.1,block=64",
    "powersgd:2",
    "rules:codec=(powersgd:1),below=0,vectors=false",
)


@pytest.mark.parametrize("text", ALIKE)
def test_pieces_that_were_cut_where_a_codec_allows_are_what_the_whole_is(text: str) -> None:
    codec, parts = codec_of(text), parts_of(SHAPES)
    values = values_of(parts[-1].hi, SPREAD, 0)
    whole = reduced(codec, parts, values)
    allowed = [position for position in range(1, len(values)) if codec.cut.allows(parts, position)]
    assert allowed
    for position in allowed[:: max(1, len(allowed) // 8)]:
        before, behind = pieces_of(parts, position)
        pieces = [reduced(codec, before, values[:position]), reduced(codec, behind, values[position:])]
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("text", "position"), [("int8", 255), ("onebit", 8), ("topk:0.1,block=64", 65)])
def test_a_block_is_not_to_be_cut(text: str, position: int) -> None:
    codec, parts = codec_of(text), parts_of(((32, 32),))
    assert not codec.cut.allows(parts, position)
    values = values_of(1024, SPREAD, 0)
    before, behind = pieces_of(parts, position)
    pieces = [reduced(codec, before, values[:position]), reduced(codec, behind, values[position:])]
    assert not torch.equal(torch.cat(pieces), reduced(codec, parts, values))


@pytest.mark.parametrize("text", ["powersgd:2", "rules:codec=(topk:0.1)", "warmup:codec=(powersgd:2)"])
def test_what_hangs_on_shapes_is_cut_between_parameters(text: str) -> None:
    parts = parts_of(SHAPES)
    allowed = {position for position in range(parts[-1].hi + 1) if codec_of(text).cut.allows(parts, position)}
    assert allowed == {0, *(part.hi for part in parts)}
