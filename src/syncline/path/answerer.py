"""Answers a codec's questions: each is one collective on a channel, which only starts.

The second and later questions of buckets have channels of their own, because a bucket's second question and the first
one of the next bucket are asked in an order that depends on the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.codecs.conversation import Conversation, Decoder, Exchange, Gather, Mean, Question
from syncline.fabric.base import Fabric
from syncline.fabric.channel import Channel
from syncline.fabric.handle import Handle

WORD_BYTES = 8


@dataclass(frozen=True)
class Asked:
    """A question under way."""

    handle: Handle
    read: Callable[[], Any]  # the answer, once the handle is done


@dataclass(frozen=True)
class FlatAnswerer:
    """All ranks take part in conversations."""

    channels: Sequence[Channel]  # one for each question of a conversation
    collective: str

    def ask(self, question: Question, number: int) -> Asked:
        """Start the collective that answers a question, the first of which has the number 0."""
        channel = self.channels[min(number, len(self.channels) - 1)]
        if isinstance(question, Mean):
            return ask_mean(question, channel, self.collective)
        if isinstance(question, Gather):
            return ask_gather(question, channel)
        return ask_exchange(question, channel)


def ask_mean(question: Mean, channel: Channel, collective: str) -> Asked:
    """16-bit values go straight to the owner of their slice, so that none travels as a partial sum of 32 bits.

    That is what parts and messages do too, whichever collective was named: it is for what is sent uncompressed.
    """
    tensor = question.tensor.contiguous()
    if tensor.element_size() == 2:
        collective = "auto" if channel.transport.name == "shm" else "direct"
    return Asked(channel.all_reduce(tensor, "mean", collective), lambda: tensor)


def ask_gather(question: Gather, channel: Channel) -> Asked:
    """Everyone's message, as long as the longest."""
    own = filled_words([question.message], max(question.lengths), channel.device)
    gathered = own.new_empty(channel.world, own.numel())

    def read() -> list[Tensor]:
        rows = gathered.view(torch.uint8)
        return [row[:length] for row, length in zip(rows, question.lengths, strict=True)]

    return Asked(channel.all_gather(gathered, own.view(-1)), read)


def ask_exchange(question: Exchange, channel: Channel) -> Asked:
    """Everyone's part for this rank, which is as long as its own part for itself."""
    own_bytes = len(question.parts[channel.rank])
    parts = filled_words(question.parts, max(map(len, question.parts)), channel.device)
    taken = torch.empty_like(parts)

    def read() -> list[Tensor]:
        rows = [row[:own_bytes] for row in taken.view(torch.uint8)]
        rows[channel.rank] = question.parts[channel.rank]
        return rows

    return Asked(channel.exchange(taken, parts), read)


def filled_words(messages: Sequence[Tensor], nbytes: int, device: torch.device) -> Tensor:
    """Messages as rows of whole words of one length, filled up with zeros."""
    words = torch.empty(len(messages), -(-nbytes // WORD_BYTES), dtype=torch.int64, device=device)
    for row, message in zip(words.view(torch.uint8), messages, strict=True):
        row[: len(message)] = message
        row[len(message) :] = 0
    return words


def converse(conversation: Conversation, answerer: FlatAnswerer, rank: int) -> tuple[Decoder, int]:
    """Carry a conversation through, waiting for every answer; what writes the mean, and the bytes this rank sent."""
    answer: Any = None
    sent_bytes = number = 0
    while True:
        try:
            question = conversation.send(answer)
        except StopIteration as end:
            return end.value, sent_bytes
        sent_bytes += question.said_bytes(rank)
        asked = answerer.ask(question, number)
        asked.handle.wait()
        answer = asked.read()
        number += 1


def flat_answerer(fabric: Fabric, collective: str, rounds: int) -> FlatAnswerer:
    """Channels for as many questions as a conversation may ask; all ranks make them together."""
    others = [fabric.channel(f"question {number}") for number in range(1, rounds)] if fabric.world > 1 else []
    return FlatAnswerer([fabric.channel(), *others], collective)
