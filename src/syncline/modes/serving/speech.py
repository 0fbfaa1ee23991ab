"""A codec's conversation with one listener, instead of between ranks.

A worker has nobody to average with: it speaks, answers itself, and what it said is sent to a server. There the same
conversation is held about zeros, and is given what the worker said for answers, so its decoder writes what the worker
meant. An exchange has nothing for others in a world of one, so it is not sent; what follows it is, and has one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.codecs.conversation import Conversation, Decoder, Exchange, Gather, Mean, Question
from syncline.errors import CorruptMessage

WORD_BYTES = 8
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
)


def speak(conversation: Conversation) -> tuple[list[Tensor], Decoder]:
    """What is to be sent, and what writes what was meant by it."""
    said: list[Tensor] = []
    question = next(conversation, None)
    while question is not None:
        if not isinstance(question, Exchange):
            said.append(what_is_said(question).detach().clone())
        try:
            question = conversation.send(answer(question, what_is_said(question)))
        except StopIteration as end:
            return said, end.value
    raise AssertionError("a codec that asks nothing")


def listen(conversation: Conversation, said: Sequence[Tensor]) -> Decoder:
    """The decoder of what somebody said."""
    left = list(said)
    question, exchanged = next(conversation, None), False
    while question is not None:
        own = what_is_said(question)
        if isinstance(question, Exchange):
            heard, exchanged = own, True
        elif left:
            heard = left.pop(0)
        else:
            raise CorruptMessage(f"{len(said)} messages are fewer than the codec asks for")
        if (exchanged or isinstance(question, Mean)) and heard.numel() != own.numel():
            raise CorruptMessage(f"{heard.numel()} elements came where {own.numel()} were expected")
        try:
            question = conversation.send(answer(question, heard))
        except StopIteration as end:
            decoder: Decoder = end.value
            if left:
                raise CorruptMessage(f"{len(said)} messages are more than the codec asks for") from None
            return decoder
    raise AssertionError("a codec that asks nothing")


def what_is_said(question: Question) -> Tensor:
    """The one tensor in it."""
    if isinstance(question, Mean):
        return question.tensor
    return question.message if isinstance(question, Gather) else question.parts[0]


def answer(question: Question, heard: Tensor) -> Any:
    """In a world of one."""
    if isinstance(question, Mean):
        return heard.to(question.tensor.dtype).view(question.tensor.shape)
    return [heard]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as whole words: how many, then the dtype and the length of each, then each."""
    head = [len(tensors)]
    rows = []
    for tensor in tensors:
        head += [DTYPES.index(tensor.dtype), tensor.numel()]
        row = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        rows.append(torch.cat([row, row.new_zeros(-row.numel() % WORD_BYTES)]))
    return torch.cat([torch.tensor(head), *(row.view(torch.int64) for row in rows)])


def unpack(words: Tensor) -> list[Tensor]:
    """What was packed, checked."""
    if not len(words) or not 0 <= (count := int(words[0])) <= (len(words) - 1) // 2:
        raise CorruptMessage(f"{len(words)} words are no packed tensors")
    head = words[1 : 1 + 2 * count].view(-1, 2).tolist()
    tensors, start = [], 1 + 2 * count
    for code, numel in head:
        if not (0 <= code < len(DTYPES) and numel >= 0):
            raise CorruptMessage(f"dtype {code} of {numel} elements is none")
        nbytes = numel * DTYPES[code].itemsize
        end = start + -(-nbytes // WORD_BYTES)
        if end > len(words):
            raise CorruptMessage(f"{len(words)} words end before {numel} elements do")
        tensors.append(words[start:end].clone().view(torch.uint8)[:nbytes].view(DTYPES[code]))
        start = end
    return tensors
