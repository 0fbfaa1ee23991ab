"""What every codec is: frozen settings and a conversation, with its state outside of it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from syncline.codecs.conversation import Conversation, Declaration
from syncline.core.parts import Part

if TYPE_CHECKING:
    from syncline.codecs.correction import Correction

State = dict[str, Tensor]  # by parameter name, and what it is: "layer.weight/factor"


class Cut(NamedTuple):
    """Where a bucket may be cut in two, each of which is then reduced on its own and sends its own share."""

    unit: Literal["element", "block", "matrix"]
    numel: int = 1  # of a block

    def allows(self, parts: Sequence[Part], position: int) -> bool:
        """Whether a bucket may be cut before this element: between two parameters, where matrices stay whole."""
        if self.unit == "matrix":
            return position in {part.lo for part in parts} | {part.hi for part in parts}
        return position % self.numel == 0


@dataclass(frozen=True)
class ReduceContext:
    """Where and when a conversation takes place."""

    rank: int
    world: int
    step: int  # one more than the passes that were good before it; the same on all ranks
    seed: int  # of the job, the same on all ranks
    parts: tuple[Part, ...]
    loss_scale: float = 1.0  # by which gradients are larger than those of the loss
    share: float = 1.0  # by which what comes is larger than the mean over ranks, where some of them have no data

    def number(self, *what: object) -> int:
        """A random number that depends on the job, the step, the first parameter and `what`, and on no other state."""
        name = self.parts[0].name if self.parts else ""
        text = repr((self.seed, self.step, name, what)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def generator(self, device: torch.device, *what: object) -> torch.Generator:
        """Randomness from that number."""
        return torch.Generator(device).manual_seed(self.number(*what))


class Codec(ABC):
    """How a bucket of gradients gets smaller and whole again."""

    name: ClassVar[str]
    feedback: bool  # whether what was not sent is kept and sent later
    says_all: ClassVar[bool] = True  # of every entry something is sent at every step
    tolerance: float = 0.0  # relative norm by which answers of native and of torch kernels may differ; 0 is to the bit

    @property
    def correction(self) -> Correction | None:
        """What becomes of gradients before the codec has them, also where there is nobody to talk to."""
        return None

    @property
    def cut(self) -> Cut:
        """Where a bucket may be cut in two."""
        return Cut("element")

    @property
    def stays_finite(self) -> bool:
        """Whether means in float32 are finite where sums of all magnitudes of all ranks are, with room to spare."""
        return True

    @property
    def carries_nonfinite(self) -> bool:
        """Whether NaN and infinity of one rank are in the mean, where all ranks see them: so nobody looks before."""
        return False

    @abstractmethod
    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        """The questions of a conversation about these parameters, whose values are float32, in their order."""

    def phase(self, step: int) -> int:
        """A number that differs between steps in which questions may differ."""
        return 0

    @property
    def most_questions(self) -> int:
        """How many questions a conversation asks at most, in any step."""
        return len(self.questions((), 1, 1))

    def start(self, parts: Sequence[Part], device: torch.device) -> State:
        """The state before the first step; most codecs have none."""
        return {}

    @abstractmethod
    def reduce(self, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """Talk about `values`, flat and of float32. When it ends, `values` hold what was not sent.

        What it returns writes the mean over ranks of what was sent. Changes of the state are to be written to a new
        tensor and put in its place: the old one may be needed again.
        """
