"""No compression: the mean of float32 values. Wire: 4 bytes an element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration, Mean
from syncline.core.parts import Part, numel_of


@dataclass(frozen=True, kw_only=True)
class NoCodec(Codec):
    """Everything is said."""

    name: ClassVar[str] = "none"
    feedback: ClassVar[bool] = False  # type: ignore[misc]

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        return (Declaration("mean", (4 * numel_of(parts),), 4),)

    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """One mean."""
        mean = yield Mean(values.clone())
        values.zero_()
        return lambda out: void(out.copy_(mean))


def void(_: object) -> None:
    """Forget a result."""
