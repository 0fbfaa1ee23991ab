"""Codecs made of others: for the first steps something else, or for some parameters nothing at all.

warmup:steps=100,codec=(topk:0.01)               everything for 100 steps, then less and less, then a hundredth
rules:codec=(topk:0.01),below=10000              small parameters and vectors as they are, the others through top-k
rules:codec=(int8),names=*norm*                  those whose names match a pattern as they are
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline.codecs.codec import Codec, Cut, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration, Mean
from syncline.codecs.correction import Correction
from syncline.codecs.none import NoCodec
from syncline.core.parts import Part
from syncline.errors import ConfigError
from syncline.specs import text_of

START = 0.25  # the fraction that is sent when the ramp begins


@dataclass(frozen=True, kw_only=True)
class Composed(Codec):
    """A codec with another one inside."""

    codec: str  # the one inside

    def __post_init__(self) -> None:
        self.inner()  # one that makes no sense is refused here

    def inner(self) -> Codec:
        """The one inside."""
        from syncline.codecs.registry import codec_of

        return codec_of(self.codec)

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        """As the one inside has it."""
        return self.inner().feedback

    @property
    def stays_finite(self) -> bool:
        """Those of the one inside are."""
        return self.inner().stays_finite

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        """That of the one inside."""
        return self.inner().tolerance

    @property
    def correction(self) -> Correction | None:
        """That of the one inside, of all parameters."""
        return self.inner().correction

    @property
    def cut(self) -> Cut:
        return self.inner().cut

    def phase(self, step: int) -> int:
        return self.inner().phase(step)

    @property
    def most_questions(self) -> int:
        return self.inner().most_questions

    def start(self, parts: Sequence[Part], device: torch.device) -> State:
        """That of the one inside."""
        return self.inner().start(parts, device)


@dataclass(frozen=True, kw_only=True)
class Warmup(Composed):
    """Everything for a while, then the codec; the fraction that it keeps falls to its own over as many steps."""

    name: ClassVar[str] = "warmup"
    steps: int = 100  # in which everything is sent

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 0:
            raise ConfigError(f"steps={self.steps} is less than 0; try warmup:steps=100,codec=({self.codec})")
        if self.correction is not None:
            raise ConfigError(
                f"{self.codec} has a warm-up of its own, which would run beside this one of {self.steps} steps; "
                f"use only that: {innermost(self).name}:warmup={self.steps}"
            )

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        return self.at(step).questions(parts, world, step)

    def phase(self, step: int) -> int:
        return step if step < 2 * self.steps else self.inner().phase(step)

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """What the step asks for."""
        return (yield from self.at(context.step).reduce(values, state, context))

    def at(self, step: int) -> Codec:
        """The codec of a step."""
        if step <= self.steps:
            return NoCodec()
        if step >= 2 * self.steps:
            return self.inner()
        return ramped(self.inner(), (step - self.steps) / self.steps)


@dataclass(frozen=True, kw_only=True)
class Rules(Composed):
    """Some parameters go as they are, the others through the codec."""

    name: ClassVar[str] = "rules"
    below: int = 4096  # parameters with fewer elements go as they are
    vectors: bool = True  # so do those of one dimension
    names: str = ""  # and those whose names match one of these patterns, separated by |

    def is_plain(self, part: Part) -> bool:
        """Whether a parameter goes as it is."""
        patterns = filter(None, self.names.split("|"))
        return (
            part.hi - part.lo < self.below
            or (self.vectors and len(part.shape) < 2)
            or any(fnmatch(part.name, pattern) for pattern in patterns)
        )

    def start(self, parts: Sequence[Part], device: torch.device) -> State:
        return self.inner().start([part for part in parts if not self.is_plain(part)], device)

    @property
    def cut(self) -> Cut:
        return Cut("matrix")  # whether a parameter goes as it is hangs on its size and shape

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        plain = [part for part in parts if self.is_plain(part)]
        coded = closed_up([part for part in parts if not self.is_plain(part)])
        return *NoCodec().questions(plain, world, step), *self.inner().questions(coded, world, step)

    @property
    def most_questions(self) -> int:
        return 1 + self.inner().most_questions

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """One mean of what goes as it is, then the other codec about the rest."""
        plain = [part for part in context.parts if self.is_plain(part)]
        coded = [part for part in context.parts if not self.is_plain(part)]
        mean = yield Mean(taken(values, plain))
        rest = taken(values, coded)
        decoder = yield from self.inner().reduce(rest, state, replace(context, parts=closed_up(coded)))
        put(values, plain, torch.zeros_like(mean))
        put(values, coded, rest)
        numel = rest.numel()  # and not `rest` itself, which would be held until the mean is written

        def write(out: Tensor) -> None:
            put(out, plain, mean)
            whole = out.new_empty(numel)
            decoder(whole)
            put(out, coded, whole)

        return write


def innermost(codec: Codec) -> Codec:
    """What a composed codec is made of."""
    while isinstance(codec, Composed):
        codec = codec.inner()
    return codec


def ramped(codec: Codec, done: float) -> Codec:
    """With the fraction that it keeps, or one inside it does, on the way from `START` to its own."""
    if isinstance(codec, Composed):
        inner = ramped(codec.inner(), done)
        return replace(codec, codec=text_of(inner.name, inner))
    keep: float = getattr(codec, "keep", 1.0)
    if keep >= START:
        return codec
    less: Any = {"keep": START * (keep / START) ** done}
    return replace(codec, **less)  # type: ignore[type-var]


def taken(values: Tensor, parts: Sequence[Part]) -> Tensor:
    """Copies of some parts, side by side."""
    return torch.cat([values[part.lo : part.hi] for part in parts]) if parts else values.new_zeros(0)


def put(values: Tensor, parts: Sequence[Part], flat: Tensor) -> None:
    """Parts back in their places."""
    start = 0
    for part in parts:
        values[part.lo : part.hi] = flat[start : start + part.hi - part.lo]
        start += part.hi - part.lo


def closed_up(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The same parts side by side."""
    moved, start = [], 0
    for part in parts:
        moved.append(part._replace(lo=start, hi=start + part.hi - part.lo))
        start += part.hi - part.lo
    return tuple(moved)
