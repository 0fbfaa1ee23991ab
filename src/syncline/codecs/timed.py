"""A codec that also says how long it thought, apart from how long it waited for answers."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, ClassVar

from torch import Tensor

from syncline.codecs.codec import Codec, Place, State
from syncline.codecs.conversation import Conversation


@dataclass
class Timed(Codec):
    """Another codec's conversations, with a stopwatch."""

    name: ClassVar[str] = "timed"
    codec: Codec
    spent_ns: int = 0

    def reduce(self, values: Tensor, state: State, place: Place) -> Conversation:
        """The same questions."""
        conversation = self.codec.reduce(values, state, place)
        answer: Any = None
        while True:
            began_ns = monotonic_ns()
            try:
                question = conversation.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self.spent_ns += monotonic_ns() - began_ns
            answer = yield question
