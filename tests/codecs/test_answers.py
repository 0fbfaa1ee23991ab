"""How a codec's questions are answered on a fabric."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

import syncline
from support.codec_cases import flat_parts
from syncline.codecs.answers import answer_to, converse
from syncline.codecs.codec import Place
from syncline.codecs.conversation import Exchange, Gather, Mean
from syncline.codecs.registry import codec_of
from syncline.fabric.base import Pending

LENGTH = 30_011


def mean_and_bytes(fabric: syncline.Fabric, collective: str, dtype: torch.dtype) -> tuple[Tensor, int]:
    """The answer to a mean, and the bytes that this rank sent for it."""
    sent = 0
    post = fabric.post

    def counting(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Pending:
        nonlocal sent
        sent += sum(tensor.nbytes for tensor, _ in sends)
        return post(sends, receives)

    fabric.post = counting
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
    headers = 10_000  # ranks also tell each other what they are about to do
    for mean, sent in answers:
        assert torch.equal(mean, exact.to(dtype))
        assert sent <= 2 * 2 * LENGTH * (world - 1) / world + headers


def heard(fabric: syncline.Fabric, is_spread: bool, most: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank hears from all: parts of its own length, of which some have none, and messages of any length."""
    if is_spread:
        fabric.hosts = tuple((rank,) for rank in range(fabric.world))
    post = fabric.post

    def watching(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Pending:
        most.append(len(receives))
        return post(sends, receives)

    fabric.post = watching
    parts = [torch.full((3 * to,), 10 * fabric.rank + to, dtype=torch.uint8) for to in range(fabric.world)]
    for_me = answer_to(Exchange(parts), fabric, "auto")
    fabric.post = post
    message = torch.full((5 * fabric.rank,), fabric.rank, dtype=torch.uint8)
    return for_me, answer_to(Gather(message), fabric, "auto")


@pytest.mark.parametrize("is_spread", [False, True], ids=["one host", "many hosts"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_hears_the_part_that_is_for_it_and_all_messages(world: int, is_spread: bool) -> None:
    most: list[int] = []
    answers = syncline.run(partial(heard, is_spread=is_spread, most=most), ranks=world, fabric="threads")
    for rank, (parts, messages) in enumerate(answers):
        assert [part.tolist() for part in parts] == [[10 * source + rank] * 3 * rank for source in range(world)]
        assert [message.tolist() for message in messages] == [[source] * 5 * source for source in range(world)]
    if world > 2:
        assert (max(most) > 1) != is_spread  # between hosts, one at a time


def known_and_asked_for(fabric: syncline.Fabric, is_spread: bool) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Messages whose lengths are known, those whose are not, and how often ranks gathered something for each."""
    if is_spread:
        fabric.hosts = tuple((rank,) for rank in range(fabric.world))
    counts = [0]
    all_gather = fabric.all_gather

    def counting(tensor: Tensor) -> Tensor:
        counts[-1] += 1
        return all_gather(tensor)

    fabric.all_gather = counting
    lengths = [7 * rank for rank in range(fabric.world)]
    message = torch.full((lengths[fabric.rank],), fabric.rank, dtype=torch.uint8)
    known = answer_to(Gather(message, lengths), fabric, "auto")
    counts.append(0)
    return known, answer_to(Gather(message), fabric, "auto"), counts


@pytest.mark.parametrize("is_spread", [False, True], ids=["one host", "many hosts"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_lengths_that_are_known_are_not_asked_for(world: int, is_spread: bool) -> None:
    for known, asked_for, counts in syncline.run(
        partial(known_and_asked_for, is_spread=is_spread), ranks=world, fabric="threads"
    ):
        assert [message.tolist() for message in known] == [[source] * 7 * source for source in range(world)]
        assert [message.tolist() for message in asked_for] == [message.tolist() for message in known]
        assert counts == ([0, 1] if is_spread else [1, 2])


def said_of_integers(fabric: syncline.Fabric) -> int:
    values = torch.randn(4 * 2560, generator=torch.Generator().manual_seed(fabric.rank))
    place = Place(fabric.rank, fabric.world, 0, 0, flat_parts(len(values)))
    _, said = converse(codec_of("int8:block=256").reduce(values, {}, place), fabric, "auto")
    return said


def test_what_a_rank_says_to_itself_is_not_counted() -> None:
    """Each value is said once, to its owner or by its owner to all, with a scale a block."""
    said = syncline.run(said_of_integers, ranks=4, fabric="threads")
    assert said == [4 * 2560 * (1 + 4 / 256)] * 4
