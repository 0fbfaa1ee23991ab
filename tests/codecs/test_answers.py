"""How a codec's questions are answered on a fabric."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import syncline
from support.catalogue import PROCESS_FABRICS
from support.codec_cases import flat_parts
from syncline.codecs.codec import ReduceContext
from syncline.codecs.conversation import Exchange, Gather, Mean, Question
from syncline.codecs.registry import codec_of
from syncline.collectives.execute import Pending
from syncline.path.answerer import FlatAnswerer
from syncline.path.stages import wire_stage

LENGTH = 30_011


def answer_to(question: Question, fabric: syncline.Fabric, collective: str) -> Any:
    """The answer of all ranks to a question, waited for."""
    answerer = FlatAnswerer([fabric.channel()], collective)
    asked = answerer.ask(question, wire_stage(question.declaration, 0, answerer.route))
    asked.handle.wait()
    return asked.read()


def mean_and_bytes(fabric: syncline.Fabric, collective: str, dtype: torch.dtype) -> tuple[Tensor, int]:
    """The answer to a mean, and the bytes that this rank sent for it."""
    sent = 0
    post = fabric.transport.post

    def counting(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Pending:
        nonlocal sent
        sent += sum(tensor.nbytes for tensor, _ in sends)
        return post(sends, receives)

    fabric.transport.post = counting
    values = (torch.arange(LENGTH) % 100 * fabric.world + fabric.rank).to(dtype)
    return answer_to(Mean(values), fabric, collective), sent


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("collective", ["auto", "ring", "halving-doubling", "tree", "double-tree", "direct"])
def test_a_mean_of_16_bit_values_travels_in_16_bits_whatever_collective_is_named(
    collective: str, dtype: torch.dtype
) -> None:
    world = 4
    answers = syncline.run(partial(mean_and_bytes, collective=collective, dtype=dtype), ranks=world, fabric="threads")
    exact = torch.arange(LENGTH) % 100 * world + (world - 1) / 2
    grain = 4096  # bytes, by which slices may differ
    for mean, sent in answers:
        assert torch.equal(mean, exact.to(dtype))
        assert sent <= 2 * 2 * LENGTH * (world - 1) / world + grain


def heard(fabric: syncline.Fabric) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What a rank hears from all: parts of its own length, of which some have none, and messages."""
    parts = [torch.full((3 * to,), 10 * fabric.rank + to, dtype=torch.uint8) for to in range(fabric.world)]
    for_me = answer_to(Exchange(parts), fabric, "auto")
    message = torch.full((5 * fabric.rank,), 1 + fabric.rank, dtype=torch.uint8)
    lengths = [5 * rank for rank in range(fabric.world)]
    known = answer_to(Gather(message, lengths), fabric, "auto")
    return for_me, known, answer_to(Gather(message, [max(lengths)] * fabric.world), fabric, "auto")


@pytest.mark.parametrize("fabric", ["threads", *PROCESS_FABRICS])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_hears_the_part_that_is_for_it_and_all_messages(world: int, fabric: str) -> None:
    for rank, (parts, known, filled) in enumerate(syncline.run(heard, ranks=world, fabric=fabric)):
        assert [part.tolist() for part in parts] == [[10 * source + rank] * 3 * rank for source in range(world)]
        assert [message.tolist() for message in known] == [[1 + source] * 5 * source for source in range(world)]
        longest = 5 * (world - 1)
        assert [message.tolist() for message in filled] == [
            [1 + source] * 5 * source + [0] * (longest - 5 * source) for source in range(world)
        ]


def said_of_integers(fabric: syncline.Fabric) -> int:
    values = torch.randn(4 * 2560, generator=torch.Generator().manual_seed(fabric.rank))
    place = ReduceContext(fabric.rank, fabric.world, 0, 0, flat_parts(len(values)))
    conversation = codec_of("int8:block=256").reduce(values, {}, place)
    to_exchange = conversation.send(None)
    to_gather = conversation.send(answer_to(to_exchange, fabric, "auto"))
    return to_exchange.said_bytes(fabric.rank) + to_gather.said_bytes(fabric.rank)


def test_what_a_rank_says_to_itself_is_not_counted() -> None:
    """Each value is said once, to its owner or by its owner to all, with a scale a block."""
    said = syncline.run(said_of_integers, ranks=4, fabric="threads")
    assert said == [4 * 2560 * (1 + 4 / 256)] * 4
