"""What a codec asks, and how it is answered.

A codec is a generator that yields questions and is sent the answers, so it can be tried without any network: `talk`
lets the conversations of all ranks answer each other.

    Mean(x)            the mean over ranks; 16-bit tensors travel as such and are summed in fp32
    Gather(message)    every rank's message, in order of rank, each as long as is known or filled up with zeros
    Exchange(parts)    every rank's part for me, in order of rank; the part for a rank has one length on all ranks

How long they are is known before: a codec declares its questions, and asks for nothing longer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["mean", "gather", "exchange"]


@dataclass(frozen=True)
class Declaration:
    """What is known of a question before it is asked: its kind, and the bytes of its messages on all ranks."""

    kind: Kind
    sizes: tuple[int, ...]  # a mean: its tensor; a gather: everyone's message; an exchange: the part for each rank
    itemsize: int = 1  # bytes of the elements that a mean adds up
    is_bound: bool = field(default=False, compare=False)  # messages may be shorter, and are filled up with zeros

    @property
    def largest(self) -> int:
        """Bytes of the largest message."""
        return max(self.sizes, default=0)

    @property
    def is_mean_of_halves(self) -> bool:
        """Whether 16-bit values are added up."""
        return self.kind == "mean" and self.itemsize == 2

    def wire_bytes(self, world: int) -> float:
        """Bytes that a rank sends, on average.

        Of a mean: a slice of each rank's to its owner, and what it owns to all. Of a gather: its message to all others,
        or theirs along. Of an exchange: all parts but its own.
        """
        if self.kind == "gather":
            return (world - 1) * self.largest
        return (2 if self.kind == "mean" else 1) * (world - 1) / world * sum(self.sizes)


@dataclass(frozen=True, eq=False)
class Mean:
    """Answered with the mean over ranks."""

    tensor: Tensor

    @property
    def declaration(self) -> Declaration:
        """Kind and sizes of this question."""
        return Declaration("mean", (self.tensor.nbytes,), self.tensor.element_size())

    def said_bytes(self, rank: int) -> int:
        """Bytes that this rank has to say."""
        return self.tensor.nbytes


@dataclass(frozen=True, eq=False)
class Gather:
    """Answered with every rank's message of bytes."""

    message: Tensor
    lengths: Sequence[int]  # of every rank's message, or as much as they may have at most: the same on all ranks
    has_entries: bool = False  # the message is one of `entries.py`, with positions

    @property
    def declaration(self) -> Declaration:
        """Kind and sizes of this question."""
        return Declaration("gather", tuple(self.lengths))

    def said_bytes(self, rank: int) -> int:
        """Bytes that this rank has to say, without the zeros that fill them up."""
        return self.message.nbytes


@dataclass(frozen=True, eq=False)
class Exchange:
    """Answered with everyone's part for this rank, all of them as long as its own."""

    parts: Sequence[Tensor]

    @property
    def declaration(self) -> Declaration:
        """Kind and sizes of this question."""
        return Declaration("exchange", tuple(part.nbytes for part in self.parts))

    def said_bytes(self, rank: int) -> int:
        """Bytes that this rank has to say: all parts but its own."""
        return sum(part.nbytes for owner, part in enumerate(self.parts) if owner != rank)


Question = Mean | Gather | Exchange
Decoder = Callable[[Tensor], bool | None]  # writes the mean over ranks; may say whether all of that is finite
Conversation = Generator[Question, Any, Decoder]


def talk(conversations: Sequence[Conversation]) -> list[Decoder]:
    """Let the ranks of a world answer each other; all must ask the same kinds of questions."""
    answers: list[Any] = [None] * len(conversations)
    decoders: list[Decoder] = []
    while not decoders:
        questions: list[Question] = []
        for conversation, answer in zip(conversations, answers, strict=True):
            try:
                questions.append(conversation.send(answer))
            except StopIteration as end:
                decoders.append(end.value)
        if questions and decoders:
            raise AssertionError("some ranks ask while others are done")
        if questions:
            answers = answers_to(questions)
    return decoders


def answers_to(questions: Sequence[Question]) -> list[Any]:
    """What each rank is told."""
    first = questions[0]
    if isinstance(first, Mean):
        tensors = [question.tensor for question in questions if isinstance(question, Mean)]
        total = tensors[0].to(torch.promote_types(tensors[0].dtype, torch.float32), copy=True)
        for tensor in tensors[1:]:
            total += tensor
        return [(total / len(tensors)).to(tensors[0].dtype) for _ in tensors]
    if isinstance(first, Gather):
        messages = [question.message for question in questions if isinstance(question, Gather)]
        lengths = [question.lengths for question in questions if isinstance(question, Gather)]
        return [list(map(filled_up, messages, lengths[0])) for _ in messages]
    parts = [question.parts for question in questions if isinstance(question, Exchange)]
    return [[theirs[rank].clone() for theirs in parts] for rank in range(len(parts))]


def filled_up(message: Tensor, length: int) -> Tensor:
    """A copy of a message, with zeros at its end up to a length."""
    return torch.cat([message, message.new_zeros(length - len(message))])
