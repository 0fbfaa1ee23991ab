"""Answers a codec's questions on a fabric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.codecs.codec import Codec, Place, State
from syncline.codecs.conversation import Conversation, Decoder, Exchange, Gather, Mean, Question
from syncline.codecs.none import void
from syncline.fabric.base import Fabric

WORD_BYTES = 8


class Alone:
    """There is nobody to talk to, so nothing is left out."""

    def collect(self, values: Tensor) -> None:
        """Before the codec is asked, which it is not."""

    def carry(self, codec: Codec, values: Tensor, state: State, place: Place) -> tuple[Decoder, int]:
        """What writes the values, which are their own mean, without a byte being said."""
        mean = values.clone()
        values.zero_()
        return lambda out: void(out.copy_(mean)), 0


@dataclass(frozen=True)
class AmongAll:
    """All ranks take part in conversations."""

    fabric: Fabric
    collective: str

    def collect(self, values: Tensor) -> None:
        """Before the codec is asked: every rank has its own to talk about."""

    def carry(self, codec: Codec, values: Tensor, state: State, place: Place) -> tuple[Decoder, int]:
        """Carry a conversation through; returns what writes the mean, and the bytes that this rank had to say."""
        return converse(codec.reduce(values, state, place), self.fabric, self.collective)


def converse(conversation: Conversation, fabric: Fabric, collective: str) -> tuple[Decoder, int]:
    """Carry a conversation through; returns what writes the mean, and the bytes that this rank had to say."""
    answer: Any = None
    said = 0
    while True:
        try:
            question = conversation.send(answer)
        except StopIteration as end:
            return end.value, said
        said += question.said_bytes(fabric.rank)
        answer = answer_to(question, fabric, collective)


def answer_to(question: Question, fabric: Fabric, collective: str) -> Any:
    """What the other ranks say to it."""
    if isinstance(question, Mean):
        return mean_of(question.tensor, fabric, collective)
    if isinstance(question, Gather):
        return gather(question, fabric)
    return exchange(question, fabric)


def mean_of(tensor: Tensor, fabric: Fabric, collective: str) -> Tensor:
    """16-bit values go straight to the owner of their slice, so that none travels as a partial sum of 32 bits.

    That is what parts and messages do too, whichever collective was named: it is for what goes as it is.
    """
    if tensor.element_size() == 2:
        collective = "auto" if fabric.name == "shm" else "direct"
    return fabric.all_reduce(tensor.contiguous(), op="mean", collective=collective)


def gather(question: Gather, fabric: Fabric) -> list[Tensor]:
    """First their lengths, unless they are known; then from rank to rank, or on one host as much as the longest has."""
    message = question.message.to(fabric.device)
    lengths = question.lengths
    if lengths is None:
        lengths = fabric.all_gather(torch.tensor([len(message)], device=fabric.device)).flatten().tolist()
    if len(fabric.hosts) > 1:
        return swap([message] * fabric.world, lengths, fabric)
    words = torch.zeros(-(-max(lengths) // WORD_BYTES), dtype=torch.int64, device=fabric.device)
    words.view(torch.uint8)[: len(message)] = message
    rows = fabric.all_gather(words).view(torch.uint8)
    return [row[:length] for row, length in zip(rows.view(fabric.world, -1), lengths, strict=True)]


def exchange(question: Exchange, fabric: Fabric) -> list[Tensor]:
    """Parts go straight to their ranks. Those for this rank are as long as its own part for itself."""
    return swap(question.parts, [len(question.parts[fabric.rank])] * fabric.world, fabric)


def swap(parts: Sequence[Tensor], lengths: Sequence[int], fabric: Fabric) -> list[Tensor]:
    """Give every rank its part, and take from each as much as is known that it has.

    Between hosts a rank hears one other at a time: several would fill the queue of its link, and what does not fit into
    that is lost and sent again.
    """
    taken = [parts[rank].new_empty(length) for rank, length in enumerate(lengths)]
    taken[fabric.rank] = parts[fabric.rank]
    at_once = 1 if len(fabric.hosts) > 1 else max(fabric.world - 1, 1)
    for first in range(1, fabric.world, at_once):
        turns = range(first, min(first + at_once, fabric.world))
        to = [(fabric.rank + turn) % fabric.world for turn in turns]
        source = [(fabric.rank - turn) % fabric.world for turn in turns]
        sends = [(parts[rank].contiguous(), rank) for rank in to if len(parts[rank])]
        fabric.post(sends, [(taken[rank], rank) for rank in source if len(taken[rank])]).wait()
    return taken
