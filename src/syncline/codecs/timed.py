"""A codec that also says how long it thought, apart from how long it waited for answers, and how it wrote positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from syncline.codecs.codec import Codec, Place, State
from syncline.codecs.conversation import Conversation, Gather, Question, overheard
from syncline.codecs.entries import positions_of


@dataclass
class Timed(Codec):
    """Another codec's conversations, with a stopwatch; where it `looks`, positions are looked at too."""

    name: ClassVar[str] = "timed"
    codec: Codec
    looks: bool = False
    spent_ns: int = 0
    positions: str = ""

    def reduce(self, values: Tensor, state: State, place: Place) -> Conversation:
        """The same questions."""

        def heard(question: Question | None, thought_ns: int) -> None:
            self.spent_ns += thought_ns
            if self.looks:
                self.positions = positions_in(question) or self.positions

        return overheard(self.codec.reduce(values, state, place), heard)


def positions_in(question: Question | None) -> str:
    """How the positions in a question were written; nothing, where it has none."""
    return positions_of(question.message) if isinstance(question, Gather) and question.has_entries else ""
