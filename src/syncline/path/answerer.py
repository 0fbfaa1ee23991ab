"""Answers a codec's questions: each is one collective on a channel, which only starts.

The second and later questions of buckets have channels of their own, because a bucket's second question and the first
one of the next bucket are asked in an order that depends on the network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.codecs.conversation import Conversation, Exchange, Gather, Mean, Question
from syncline.codecs.none import void
from syncline.fabric.base import Fabric
from syncline.fabric.channel import Channel
from syncline.fabric.handle import Handle
from syncline.path.stages import WORD_BYTES, Route, Stage

FAR_STEP = 1 << 40  # no warm-up is as long


@dataclass(frozen=True)
class Asked:
    """A question under way."""

    handle: Handle
    read: Callable[[], Any]  # the answer, once the handle is done


class Answerer(ABC):
    """Answers the questions of a codec, as the stages of a bucket say."""

    route: Route
    waits: ClassVar[bool] = False  # for every answer, so that conversations do not overlap

    def begin(self, codec: Codec, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """A conversation about values."""
        return codec.reduce(values, state, context)

    @abstractmethod
    def ask(self, question: Question, stage: Stage) -> Asked:
        """Start the collective that answers a question."""


class LoneAnswerer(Answerer):
    """There is nobody to ask in a world of one, and nothing is left out."""

    route = Route(1)

    def begin(self, codec: Codec, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """What was to be sent is the mean."""
        mean = values.clone()
        values.zero_()
        yield from ()
        return lambda out: void(out.copy_(mean))

    def ask(self, question: Question, stage: Stage) -> Asked:
        raise AssertionError("in a world of one nothing is asked")


class FlatAnswerer(Answerer):
    """All ranks take part in conversations."""

    def __init__(self, channels: Sequence[Channel], collective: str) -> None:
        """There is a channel for each question of a conversation."""
        first = channels[0]
        self.channels = channels
        of_halves = "auto" if first.transport.name == "shm" else "direct"
        self.route = Route(first.world, first.rank, (), collective, of_halves)

    def ask(self, question: Question, stage: Stage) -> Asked:
        channel = self.channels[stage.number]
        if isinstance(question, Mean):
            return ask_mean(question, channel, stage.collective)
        if isinstance(question, Gather):
            return ask_gather(question, channel)
        return ask_exchange(question, channel)


def ask_mean(question: Mean, channel: Channel, collective: str) -> Asked:
    """Everyone's tensor, added up and divided."""
    tensor = question.tensor.contiguous()
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


def flat_answerer(fabric: Fabric, collective: str, codec: Codec) -> FlatAnswerer:
    """Channels for as many questions as a conversation may ask; all ranks make them together."""
    channels = [fabric.channel(), *(fabric.channel(f"question {number}") for number in range(1, codec.most_questions))]
    prepare_means_of_halves(channels, codec)
    return FlatAnswerer(channels, collective)


def prepare_means_of_halves(channels: Sequence[Channel], codec: Codec) -> None:
    """Make ready for those that a codec will ask for in its first step, or when its warm-up is over."""
    for step in (1, FAR_STEP):
        for channel, question in zip(channels, codec.questions((), channels[0].world, step), strict=False):
            if question.is_mean_of_halves:
                channel.prepare_means_of_halves()
