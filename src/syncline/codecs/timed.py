"""A codec that also says how long it thought, apart from how long it waited for answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from syncline.codecs.codec import Codec, Place, State
from syncline.codecs.conversation import Conversation, Question, overheard


@dataclass
class Timed(Codec):
    """Another codec's conversations, with a stopwatch."""

    name: ClassVar[str] = "timed"
    codec: Codec
    spent_ns: int = 0

    def reduce(self, values: Tensor, state: State, place: Place) -> Conversation:
        """The same questions."""

        def heard(_: Question | None, thought_ns: int) -> None:
            self.spent_ns += thought_ns

        return overheard(self.codec.reduce(values, state, place), heard)
