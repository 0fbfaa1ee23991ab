"""What codecs do to learning: real training with each of them, against dense, over seeds and at equal steps.

Every rank has its own data. Two small tasks, so that all codecs with three seeds take minutes: a byte-level GPT on the
text of the standard library, and a classifier of handwritten digits. Losses are of data that no rank has trained on.

All train with SGD and momentum, the same learning rates and the same schedule: up over the first tenth, then down to a
tenth. A codec with a momentum of its own (dgc) has plain SGD on top.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncline.codecs.codec import Codec, Part, Place, State
from syncline.codecs.conversation import Conversation
from syncline.codecs.registry import codec_of
from syncline.errors import NonFiniteGradient, SynclineError
from syncline.fabric.base import Fabric
from syncline.launch import run
from syncline.sync import Sync
from syncline.workloads.digits import DigitBatches, load_digits, make_classifier
from syncline.workloads.gpt import Shape, make_gpt
from syncline.workloads.text import Batches, standard_library

DENSE = "none"
CODECS: tuple[str, ...] = (
    DENSE,
    "fp16",
    "bf16",
    "int8",
    "int4",
    "onebit",
    "onebit:block=512",
    "topk:0.01",
    "warmup:steps=50,codec=(topk:0.01)",
    "randomk:0.01",
    "powersgd:4",
    "dgc",
    "dgc:masking=true",
)
MOMENTUM = 0.9
SMALLEST_RATE = 0.1  # at the end, of the learning rate


class Score(NamedTuple):
    """Of a model on data that it has not seen."""

    loss: float
    accuracy: float | None = None


class Workload(Protocol):
    """What is trained."""

    title: str
    steps: int
    learning_rate: float

    def model(self, seed: int) -> nn.Module:
        """As it starts."""

    def losses(self, seed: int) -> Callable[[nn.Module, int, int], Tensor]:
        """The loss of a model in a step on a rank."""

    def score(self, model: nn.Module) -> Score:
        """How good it is."""


class SmallGpt:
    """A GPT of 69 thousand parameters; that of `syncline demo` has 10 million, too many for all codecs and seeds."""

    shape: ClassVar[Shape] = Shape(width=64, layers=1, heads=4, context=32)
    title = "GPT of 69 k parameters, text of the standard library"
    steps = 250
    learning_rate = 0.05
    batch = 8
    held_back = 200_000  # bytes at the end of the text

    def __init__(self) -> None:
        self.text = standard_library()

    def model(self, seed: int) -> nn.Module:
        """As it starts."""
        return make_gpt(self.shape, seed)

    def losses(self, seed: int) -> Callable[[nn.Module, int, int], Tensor]:
        """Of a batch of pieces of text."""
        batches = Batches(self.text[: -self.held_back], self.shape.context, self.batch, seed)
        return lambda model, step, rank: next_byte_loss(model, batches.of(step, rank))

    def score(self, model: nn.Module) -> Score:
        """On text that was held back."""
        batches = Batches(self.text[-self.held_back :], self.shape.context, 64)
        return Score(mean(float(next_byte_loss(model, batches.of(step, 0))) for step in range(8)))


def next_byte_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Cross entropy of every next byte."""
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


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


WORKLOADS: dict[str, Callable[[], Workload]] = {"gpt": SmallGpt, "digits": DigitClassifier}


@cache
def workload_of(name: str) -> Workload:
    """Its data is read once in a process."""
    return WORKLOADS[name]()


# On one rank


@dataclass(frozen=True)
class Metered(Codec):
    """A codec, and the bytes that a rank sends for it."""

    name: ClassVar[str] = "metered"
    inner: Codec
    sent: list[float] = field(default_factory=list, repr=False, compare=False)  # of every conversation

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        """As the one inside has it."""
        return self.inner.feedback

    def start(self, parts: Sequence[Part], device: torch.device) -> State:
        """That of the one inside."""
        return self.inner.start(parts, device)

    def reduce(self, values: Tensor, state: State, place: Place) -> Conversation:
        """The same conversation."""
        talk = self.inner.reduce(values, state, place)
        answer: Any = None
        while True:
            try:
                question = talk.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            self.sent.append(question.wire_bytes(place.world))
            answer = yield question


@dataclass(frozen=True)
class Trained:
    """One training."""

    score: Score
    curve: list[float]  # the mean loss over ranks, of every few steps
    sent_bytes: float  # by a rank in a step, the mean of all
    end_sent_bytes: float  # the same in the last tenth, when codecs are warm
    digest: str  # of the weights


CURVE_POINTS = 50


def train(fabric: Fabric, start: nn.Module, workload: str, codec: str, seed: int, steps: int) -> Trained:
    """What one rank does, with a copy of the model as it starts."""
    torch.set_num_threads(1)
    task = workload_of(workload)
    model = deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate, momentum=momentum_for(codec_of(codec)))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_at, steps=steps))
    metered = Metered(codec_of(codec))
    sync = Sync(model, optimizer, fabric=fabric, codec=metered, seed=seed, nonfinite="raise")
    loss_of = task.losses(seed)
    losses, sent = [], []
    with suppress(NonFiniteGradient):  # which all ranks raise in the same step
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, step, fabric.rank)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            sent.append(sum(metered.sent))
            metered.sent.clear()
    sync.close()
    losses += [math.nan] * (steps - len(losses))
    curve = fabric.all_reduce(torch.tensor(thinned(losses)), op="mean").tolist()
    with torch.no_grad():
        score = task.score(model) if len(sent) == steps else Score(math.nan)
    return Trained(score, curve, mean(sent), mean(sent[-max(1, steps // 10) :]), digest_of(model))


def momentum_for(codec: Codec) -> float:
    """Of the optimizer: none if the codec has its own."""
    return 0.0 if hasattr(codec, "momentum") else MOMENTUM


def rate_at(step: int, steps: int) -> float:
    """Up over the first tenth, then down as a cosine does."""
    rising = max(1, steps // 10)
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return SMALLEST_RATE + (1 - SMALLEST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def thinned(losses: Sequence[float]) -> list[float]:
    """Means of neighbours, about fifty of them."""
    width = max(1, len(losses) // CURVE_POINTS)
    return [mean(losses[at : at + width]) for at in range(0, len(losses) - width + 1, width)]


def digest_of(model: nn.Module) -> str:
    """Of the bits of all parameters."""
    found = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# All of them


@dataclass(frozen=True)
class ConvergenceRow:
    """One codec on one workload; means over seeds."""

    workload: str
    title: str
    codec: str
    momentum: float  # of the optimizer
    ranks: int
    seeds: int
    steps: int
    sent_bytes: float  # by a rank in a step
    end_sent_bytes: float
    times_less: float  # than dense, over the whole training
    loss: float
    losses: list[float]  # of every seed
    ratio: float  # of the loss to that of dense
    accuracy: float | None
    curve: list[float]

    @property
    def has_diverged(self) -> bool:
        """Whether a seed ended in gradients that are not finite."""
        return not math.isfinite(self.loss)

    def as_data(self) -> dict[str, object]:
        """For programs; what has diverged is null."""
        known = {key: null_if_unknown(value) for key, value in asdict(self).items()}
        return known | {
            "losses": list(map(null_if_unknown, self.losses)),
            "curve": list(map(null_if_unknown, self.curve)),
        }


def null_if_unknown(value: object) -> object:
    """None for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare_codecs(
    workloads: Sequence[str],
    codecs: Sequence[str],
    seeds: int,
    steps: int | None,
    ranks: int,
    tell: Callable[[str], None],
    fabric: str = "auto",
) -> list[ConvergenceRow]:
    """Every codec on every workload. Dense is trained first, whether it was asked for or not."""
    rows = []
    for workload in workloads:
        task = workload_of(workload)
        length = steps or task.steps
        starts = [task.model(seed) for seed in range(seeds)]  # not on the ranks: threads share torch's random numbers
        with told_by_others(tell) as notes:
            work = partial(train_all, starts=starts, workload=workload, codecs=codecs, steps=length, notes=notes)
            by_rank = run(work, ranks=ranks, fabric=fabric)
        check_digests(workload, by_rank)
        dense = by_rank[0][DENSE]
        rows += [row_of(workload, codec, ranks, length, found, dense) for codec, found in by_rank[0].items()]
    return rows


def train_all(
    fabric: Fabric, starts: Sequence[nn.Module], workload: str, codecs: Sequence[str], steps: int, notes: Path
) -> dict[str, list[Trained]]:
    """Every codec with every seed, one after the other on the same ranks; starting ranks anew would take longer."""
    log = logging.getLogger("syncline")
    log.setLevel(logging.ERROR)  # what codecs say of themselves is in the table
    trained: dict[str, list[Trained]] = {}
    for codec in dict.fromkeys([DENSE, *codecs]):
        for seed, start in enumerate(starts):
            if fabric.rank == 0:
                with notes.open("a") as file:
                    file.write(f"{workload}, {codec}, seed {seed}\n")
            trained.setdefault(codec, []).append(train(fabric, start, workload, codec, seed, steps))
    log.setLevel(logging.NOTSET)
    return trained


@contextmanager
def told_by_others(tell: Callable[[str], None]) -> Iterator[Path]:
    """A file of which every new line is told, so that ranks in other processes can tell what they do."""
    done = Event()

    def follow(path: Path) -> None:
        with path.open() as file:
            while not done.wait(0.1):
                for line in file:
                    tell(line.strip())

    with TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        follower = Thread(target=follow, args=(notes,), daemon=True)
        follower.start()
        try:
            yield notes
        finally:
            done.set()
            follower.join()


def check_digests(workload: str, by_rank: Sequence[dict[str, list[Trained]]]) -> None:
    """Ranks must end with the same bits."""
    for codec in by_rank[0]:
        for same in zip(*(of_rank[codec] for of_rank in by_rank), strict=True):
            if len({one.digest for one in same}) > 1:
                raise SynclineError(f"{workload}, {codec}: ranks have different weights, so their loss means nothing")


def row_of(
    workload: str, codec: str, ranks: int, steps: int, trained: Sequence[Trained], dense: Sequence[Trained]
) -> ConvergenceRow:
    """The means over seeds."""
    losses = [one.score.loss for one in trained]
    sent = mean(one.sent_bytes for one in trained)
    accuracies = [one.score.accuracy for one in trained if one.score.accuracy is not None]
    return ConvergenceRow(
        workload=workload,
        title=workload_of(workload).title,
        codec=codec,
        momentum=momentum_for(codec_of(codec)),
        ranks=ranks,
        seeds=len(trained),
        steps=steps,
        sent_bytes=sent,
        end_sent_bytes=mean(one.end_sent_bytes for one in trained),
        times_less=mean(one.sent_bytes for one in dense) / sent,
        loss=mean(losses),
        losses=losses,
        ratio=mean(losses) / mean(one.score.loss for one in dense),
        accuracy=mean(accuracies) if accuracies else None,
        curve=[mean(points) for points in zip(*(one.curve for one in trained), strict=True)],
    )
