"""Whatever comes instead of a peer's message: an error, or a mean where it belongs, and never a write anywhere else.

The kernels take pointers, so lengths are checked before they are called. Values and means lie between guards here; that
kernels stay inside of what they are told is seen by the address sanitizer, in `native/tests`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from support.codec_cases import SETTINGS, gradients_of, parts_of
from syncline.codecs import kernels
from syncline.codecs.codec import ReduceContext
from syncline.codecs.conversation import Conversation, Mean, answers_to
from syncline.codecs.kernels import reference
from syncline.codecs.registry import codec_of
from syncline.errors import CorruptMessage
from syncline.path.codec_state import BucketCodecState

WORLD, STEP = 3, 10  # of which the warm-ups of all settings are over
PARTS = parts_of(((40, 30), (71,)))
NUMEL = PARTS[-1].hi
GUARD = 64
Breaks = Callable[[Tensor], Tensor]


class Guarded:
    """Values between others that nobody may change."""

    def __init__(self, values: Tensor) -> None:
        self.whole = torch.full((len(values) + 2 * GUARD,), 12345.0)
        self.values = self.whole[GUARD:-GUARD]
        self.values.copy_(values)

    def check(self) -> None:
        assert bool((self.whole[:GUARD] == 12345.0).all())
        assert bool((self.whole[-GUARD:] == 12345.0).all())


def conversations(text: str) -> tuple[list[Conversation], list[Guarded]]:
    """Of all ranks."""
    codec = codec_of(text)
    values = [Guarded(gradient) for gradient in gradients_of(WORLD, NUMEL, STEP)]
    states = [BucketCodecState.begin(codec, PARTS, torch.device("cpu"), feedback=False).state for _ in range(WORLD)]
    places = [ReduceContext(rank, WORLD, STEP, 0, PARTS) for rank in range(WORLD)]
    return [codec.reduce(values[rank].values, states[rank], places[rank]) for rank in range(WORLD)], values


def hear(text: str, broken_answer: int, sender: int, breaks: Breaks) -> bool:
    """Whether rank 0 finds a mean although what it hears from a sender is broken; False if it refuses it."""
    talks, values = conversations(text)
    out = Guarded(torch.zeros(NUMEL))
    try:
        decoder, answers = None, [None] * WORLD
        for number in range(-1, 10):
            if number == broken_answer:
                answers[0][sender] = breaks(answers[0][sender])
            questions = []
            for talk, answer in zip(talks, answers, strict=True):
                try:
                    questions.append(talk.send(answer))
                except StopIteration as end:
                    decoder = decoder or end.value
            if decoder is not None:
                break
            answers = answers_to(questions)
        assert decoder is not None
        decoder(out.values)
    except CorruptMessage:
        return False
    finally:
        for one in (out, *values):
            one.check()
    return True


def byte_answers(text: str) -> list[int]:
    """Which of the answers to a codec are messages of others, not means."""
    talks, _ = conversations(text)
    found, answers = [], [None] * WORLD
    for number in range(10):
        try:
            questions = [talk.send(answer) for talk, answer in zip(talks, answers, strict=True)]
        except StopIteration:
            break
        if not isinstance(questions[0], Mean):
            found.append(number)
        answers = answers_to(questions)
    return found


HEARD = [(text, number) for text in SETTINGS for number in byte_answers(text)]


@pytest.fixture(params=["native", "torch"], autouse=True)
def both_kinds_of_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(kernels, "native", None)


def test_every_codec_that_says_bytes_is_among_them() -> None:
    names = {codec_of(text).name for text, _ in HEARD}
    assert names == {"fp16", "bf16", "int8", "int4", "onebit", "topk", "dgc", "warmup", "rules"}


@pytest.mark.parametrize(("text", "answer"), HEARD)
def test_a_message_that_is_too_short_or_too_long_is_refused(text: str, answer: int) -> None:
    chance = random.Random(text)
    assert hear(text, answer, 1, lambda message: message)
    for length in (0, 4):
        assert not hear(text, answer, 1, lambda message, length=length: message[:length])
    for _ in range(2):
        sender = chance.randrange(1, WORLD)
        assert not hear(text, answer, sender, lambda message: message[: chance.randrange(len(message))].clone())
        more = torch.tensor([chance.randrange(256) for _ in range(chance.randrange(1, 40))], dtype=torch.uint8)
        assert not hear(text, answer, sender, lambda message, more=more: torch.cat([message, more]))


@pytest.mark.parametrize(("text", "answer"), HEARD)
def test_a_message_of_any_bytes_is_refused_or_read_in_bounds(text: str, answer: int) -> None:
    chance = random.Random(text)

    def some_bytes(message: Tensor) -> Tensor:
        broken = message.clone()
        for _ in range(chance.randrange(1, 6)):
            broken[chance.randrange(min(len(broken), chance.choice([16, 40, len(broken)])))] = chance.randrange(256)
        return broken

    def all_bytes(message: Tensor) -> Tensor:
        return torch.tensor([chance.randrange(256) for _ in range(len(message))], dtype=torch.uint8)

    for number in range(5):
        hear(text, answer, chance.randrange(1, WORLD), all_bytes if number == 0 else some_bytes)


def coded(bits: int, block: int) -> tuple[Tensor, Callable[[Tensor, Tensor], None], Callable[[Tensor], Tensor]]:
    """A message, its decoder, and the reference of that."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(bits))
    if bits == 1:
        decode, slow = kernels.unpack_signs, reference.unpack_signs
        return (
            reference.pack_signs(values, block),
            partial(decode, block=block),
            partial(slow, numel=NUMEL, block=block),
        )
    settings = {"block": block, "bits": bits}
    message = reference.quantize(values, block, bits, None)
    return message, partial(kernels.dequantize, **settings), partial(reference.dequantize, numel=NUMEL, **settings)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 3e38, 0.0])
@pytest.mark.parametrize(("bits", "block"), [(8, 256), (4, 64), (1, 32)])
def test_a_corrupt_scale_stays_in_its_block(bits: int, block: int, scale: float) -> None:
    """It is a number like any other, so it is not refused."""
    message, decode, slow = coded(bits, block)
    good, broken = slow(message), Guarded(torch.zeros(NUMEL))
    dtype = torch.bfloat16 if bits == 1 else torch.float32
    message[: 3 * dtype.itemsize].view(dtype)[2] = scale  # of the third block
    decode(message, broken.values)
    broken.check()
    assert torch.equal(broken.values.isnan(), slow(message).isnan())
    assert torch.equal(broken.values.nan_to_num(), slow(message).nan_to_num())
    broken.values[2 * block : 3 * block] = good[2 * block : 3 * block]
    assert torch.equal(broken.values, good)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 99, 101])
def test_halves_of_another_length_are_refused(dtype: torch.dtype, length: int) -> None:
    with pytest.raises(CorruptMessage, match=f"{2 * length} bytes"):
        kernels.widen(torch.zeros(100), torch.zeros(length, dtype=dtype))
