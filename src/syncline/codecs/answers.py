"""Answers a codec's questions on a fabric."""

from __future__ import annotations

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
    """Messages of any lengths: the lengths first, then as many words as the longest has."""
    message = question.message
    lengths = [len(message)] * fabric.world
    if not question.fixed:
        lengths = fabric.all_gather(torch.tensor([len(message)], device=fabric.device)).flatten().tolist()
    words = torch.zeros(-(-max(lengths) // WORD_BYTES), dtype=torch.int64, device=fabric.device)
    words.view(torch.uint8)[: len(message)] = message.to(fabric.device)
    rows = fabric.all_gather(words).view(torch.uint8)
    return [row[:length] for row, length in zip(rows.view(fabric.world, -1), lengths, strict=True)]


def exchange(question: Exchange, fabric: Fabric) -> list[Tensor]:
    """Parts go straight to their ranks. Those for this rank are as long as its own part for itself."""
    own = question.parts[fabric.rank]
    taken = [own if rank == fabric.rank else torch.empty_like(own) for rank in range(fabric.world)]
    others = [rank for rank in range(fabric.world) if rank != fabric.rank]
    receives = [(taken[rank], rank) for rank in others if len(own)]
    sends = [(question.parts[rank].contiguous(), rank) for rank in others if len(question.parts[rank])]
    fabric.post(sends, receives).wait()
    return taken
