"""Two small tasks that are really learned: the text of the standard library, byte by byte, and handwritten digits.

Every rank has its own data; scores are of data that no rank has trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from statistics import mean
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from syncline.workloads.digits import DigitBatches, load_digits, make_classifier
from syncline.workloads.gpt import SHAPES, Shape, make_gpt, next_byte_loss
from syncline.workloads.text import Batches, standard_library


class Score(NamedTuple):
    """Of a model on data that it has not seen."""

    loss: float
    accuracy: float | None = None


@dataclass(frozen=True)
class GptTask:
    """A GPT on the text of the standard library."""

    title: str
    shape: Shape
    steps: int
    batch: int
    learning_rate: float = 0.05
    judged: int = 512  # pieces of the text that was held back
    held_back: int = 200_000  # bytes at the end of the text
    text: Tensor = field(default_factory=standard_library, repr=False, compare=False)

    def model(self, seed: int) -> nn.Module:
        """As it starts."""
        return make_gpt(self.shape, seed)

    def losses(self, seed: int) -> Callable[[nn.Module, int, int], Tensor]:
        """Of a batch of pieces of text."""
        batches = Batches(self.text[: -self.held_back], self.shape.context, self.batch, seed)
        return lambda model, step, rank: next_byte_loss(model, batches.of(step, rank))

    def score(self, model: nn.Module) -> Score:
        """On text that was held back."""
        batches = Batches(self.text[-self.held_back :], self.shape.context, self.judged // 8)
        return Score(mean(float(next_byte_loss(model, batches.of(step, 0))) for step in range(8)))


def small_gpt() -> GptTask:
    """Small enough for all codecs and seeds in some minutes."""
    shape = Shape(width=64, layers=1, heads=4, context=32)
    return GptTask("GPT of 69 k parameters, text of the standard library", shape, steps=250, batch=8)


def demo_gpt() -> GptTask:
    """That of `syncline demo`; a training takes a minute or two."""
    return GptTask(
        "GPT of 10 M parameters, text of the standard library",
        SHAPES["10M"],
        steps=200,
        batch=2,
        judged=128,
    )


class DigitClassifier:
    """A perceptron of 26 thousand parameters."""

    title = "classifier of 26 k parameters, handwritten digits"
    steps = 300
    learning_rate = 0.05
    batch = 16

    def __init__(self) -> None:
        self.learned, self.judged = load_digits()

    def model(self, seed: int) -> nn.Module:
        """As it starts."""
        return make_classifier(seed=seed)

    def losses(self, seed: int) -> Callable[[nn.Module, int, int], Tensor]:
        """Of a batch of images."""
        batches = DigitBatches(self.learned, self.batch, seed)

        def of(model: nn.Module, step: int, rank: int) -> Tensor:
            images, labels = batches.of(step, rank)
            return F.cross_entropy(model(images), labels)

        return of

    def score(self, model: nn.Module) -> Score:
        """On images that were held back."""
        logits = model(self.judged.images)
        right = (logits.argmax(1) == self.judged.labels).float().mean()
        return Score(float(F.cross_entropy(logits, self.judged.labels)), float(right))


Task = GptTask | DigitClassifier
TASKS: dict[str, Callable[[], Task]] = {"gpt": small_gpt, "digits": DigitClassifier, "demo": demo_gpt}
QUICK = ("gpt", "digits")


@cache
def task_of(name: str) -> Task:
    """Its data is read once in a process."""
    return TASKS[name]()
