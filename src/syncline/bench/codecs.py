"""How fast codecs are on one core, and the link speed below which each of them pays.

The ranks of a world talk to each other in one process, and what one of them computes is timed: up to its first
question (encode), and from the last answer to the mean (decode); what an owner of a slice does in between belongs to
decoding. Each repeat has a new gradient, with what was kept added as error feedback does it; a momentum before the
codec belongs to encoding. The native kernels and their twins in torch take turns, and must first come to the same
answer, of gradients that are drawn from a seed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from syncline.bench.metering import Meter, cleanest
from syncline.codecs import kernels
from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.codecs.conversation import Gather, Question, answers_to
from syncline.codecs.entries import positions_of
from syncline.codecs.registry import codec_of, text_of_codec
from syncline.core.parts import Part
from syncline.errors import SynclineError
from syncline.path.codec_state import BucketCodecState
from syncline.reducer.heap import keep_freed_memory

MEASURED: tuple[str, ...] = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "onebit",
    "topk:0.01",
    "topk:0.01,values=int8",
    "randomk:0.01",
    "powersgd:2",
    "powersgd:4",
    "dgc:0.001,warmup=0",
)

SEED = 0  # of the gradients
WIDTH = 512  # of the transformer whose gradients are coded


@dataclass(frozen=True)
class CodecSpeed:
    """Of one codec; speeds in GB/s of gradients."""

    codec: str
    encode_gb_s: float
    decode_gb_s: float
    twin_encode_gb_s: float
    twin_decode_gb_s: float
    wire_bytes_per_element: float  # that a rank sends
    dense_bytes_per_element: float
    nbytes: int
    positions: str = ""  # how those of chosen entries were written
    busy_elsewhere: float = 0.0  # cores that other processes took

    @property
    def compute_s(self) -> float:
        """Encoding and decoding of the bucket."""
        if self.codec == "none":
            return 0.0
        return self.nbytes / 1e9 * (1 / self.encode_gb_s + 1 / self.decode_gb_s)

    @property
    def times_twin(self) -> float:
        """How many times faster than in torch, both ways together."""
        twin = 1 / self.twin_encode_gb_s + 1 / self.twin_decode_gb_s
        return twin / (1 / self.encode_gb_s + 1 / self.decode_gb_s)

    @property
    def break_even_gbit_s(self) -> float:
        """On a slower link it pays, if nothing is hidden."""
        saved = (self.dense_bytes_per_element - self.wire_bytes_per_element) * self.nbytes / 4
        return 8e-9 * saved / self.compute_s if self.compute_s else 0.0

    def seconds_on(self, link_gbit_s: float) -> float:
        """To average the bucket, if nothing is hidden."""
        return self.compute_s + self.wire_bytes_per_element * self.nbytes / 4 * 8e-9 / link_gbit_s


def measure_codecs(
    nbytes: int, world: int, repeats: int, tell: Callable[[str], None], seed: int = SEED
) -> list[CodecSpeed]:
    """All of them, on one thread."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory(nbytes)  # as in training
    speeds = []
    for text in MEASURED:
        tell(text)
        (ours, theirs), busy = cleanest(partial(time_codec, codec_of(text), nbytes // 4, world, repeats, seed), Meter())
        ours_in, ours_out, theirs_in, theirs_out = (nbytes / 1e9 / s for s in (*ours.medians(), *theirs.medians()))
        wire, dense = ours.wire / (nbytes // 4), 8 * (world - 1) / world
        speed = ours_in, ours_out, theirs_in, theirs_out, wire, dense
        speeds.append(CodecSpeed(text, *speed, nbytes, ours.positions, busy))
    torch.set_num_threads(threads_before)
    return speeds


@contextmanager
def without_native() -> Iterator[None]:
    """Only the twins."""
    found, kernels.native = kernels.native, None
    try:
        yield
    finally:
        kernels.native = found


def time_codec(codec: Codec, numel: int, world: int, repeats: int, seed: int = SEED) -> tuple[Trial, Trial]:
    """Natively and in torch, by turns, and each as often first: whoever is second finds memory that is in use already.

    Both are given the same gradients, and the first step, which is not timed, must have the same answer.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = some_parameters(numel)
    ours, theirs = (Trial.begin(codec, parts, world, is_native) for is_native in (True, False))
    for step in range(repeats + 1):
        draw = torch.randn if step else uneven
        gradients = [draw(numel, generator=generator) for _ in range(world)]
        turns = (ours, theirs) if step % 2 else (theirs, ours)
        answers = {id(trial): trial.run([gradient.clone() for gradient in gradients], step) for trial in turns}
        if step == 0:
            check_answers(codec, answers[id(ours)], answers[id(theirs)], seed)
    return ours, theirs


def some_parameters(numel: int) -> tuple[Part, ...]:
    """What a bucket holds: matrices and biases of the blocks of a transformer, and at the end rows of an embedding."""
    width = WIDTH
    while 12 * width**2 > numel // 2 and width > 1:
        width //= 2
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    block = [torch.Size(shape) for matrix in matrices for shape in (matrix, matrix[:1])]
    parts: list[Part] = []
    left = numel
    for shape in itertools.cycle(block):
        if shape.numel() > left:
            break
        parts.append(Part(f"parameter {len(parts)}", numel - left, numel - left + shape.numel(), shape))
        left -= shape.numel()
    rows = left // width
    end = Part("rows", numel - left, numel - left + rows * width, torch.Size([rows, width]))
    return (*parts, end, Part("rest", end.hi, numel, torch.Size([numel - end.hi])))


def uneven(numel: int, generator: torch.Generator) -> Tensor:
    """Values of many sizes, of which some are equal and some are zero: all that makes kernels differ."""
    steps = torch.randint(-8, 9, (numel,), generator=generator) * 2.0 ** torch.randint(
        -10, 11, (1,), generator=generator
    )
    normal = torch.randn(numel, generator=generator) * torch.logspace(-10, 10, max(numel, 1), base=2)[:numel]
    return torch.where(torch.rand(numel, generator=generator) < 0.5, steps, normal)


def check_answers(codec: Codec, answer: Tensor, expected: Tensor, seed: int) -> None:
    """Refuse answers that are not those of the twin, or not within the tolerance of a codec that has one."""
    if torch.equal(answer, expected):
        return
    distance = float((answer - expected).norm() / expected.norm())
    if not distance <= codec.tolerance:
        share = float((answer != expected).float().mean())
        raise SynclineError(
            f"{text_of_codec(codec)}: {100 * share:.4f} % of the native answer differ from that of the twin, by "
            f"{distance:.1g} in norm where {codec.tolerance:g} is allowed, with gradients of --seed {seed}, so its "
            "speed means nothing; please report this"
        )


@dataclass
class Trial:
    """A codec at work in all ranks, and what it keeps between steps."""

    codec: Codec
    is_native: bool  # or all of torch
    parts: tuple[Part, ...]
    states: list[State]
    kept: list[Tensor]
    timings: list[tuple[float, float]]
    wire: float = 0.0  # bytes that rank 0 sends
    positions: str = ""  # how it wrote those of chosen entries

    @classmethod
    def begin(cls, codec: Codec, parts: tuple[Part, ...], world: int, is_native: bool = True) -> Trial:
        """Nothing is kept yet."""
        states = [BucketCodecState.begin(codec, parts, torch.device("cpu"), feedback=False).state for _ in range(world)]
        return cls(codec, is_native, parts, states, [torch.zeros(parts[-1].hi) for _ in range(world)], [])

    def run(self, gradients: list[Tensor], step: int) -> Tensor:
        """One step; returns the mean."""
        out = torch.full_like(gradients[0], torch.nan)  # memory in use, as in training
        with nullcontext() if self.is_native else without_native():
            encode, decode, asked = time_step(self.codec, gradients, self.kept, self.states, step, self.parts, out)
        self.timings.append((encode, decode))
        self.wire = sum(question.declaration.wire_bytes(len(gradients)) for question in asked)
        self.positions = "".join(
            positions_of(one.message) for one in asked if isinstance(one, Gather) and one.has_entries
        )
        return out

    def medians(self) -> tuple[float, float]:
        """Seconds of encoding and of decoding on rank 0, in all steps but the first."""
        encodes, decodes = zip(*self.timings[1:], strict=True)
        return median(encodes), median(decodes)


def time_step(
    codec: Codec,
    gradients: list[Tensor],
    kept: list[Tensor],
    states: Sequence[State],
    step: int,
    parts: tuple[Part, ...],
    out: Tensor,
) -> tuple[float, float, list[Question]]:
    """One step of all ranks, of which the first is timed, and writes the mean. Also what it asked."""
    world = len(gradients)
    clocks: list[float] = []
    asked: list[Question] = []
    places = [ReduceContext(rank, world, step, 0, parts) for rank in range(world)]
    correcting = correct(codec, gradients, states, places)
    if codec.feedback:
        gradients[0].add_(kept[0])
        for rank in range(1, world):
            gradients[rank].add_(kept[rank])
    talks = [codec.reduce(gradients[rank], states[rank], places[rank]) for rank in range(world)]
    answers: list[Any] = [None] * world
    decoder = None
    while decoder is None:
        questions: list[Question] = []
        for rank, talk in enumerate(talks):
            started = time.perf_counter()
            try:
                questions.append(talk.send(answers[rank]))
            except StopIteration as end:
                decoder = decoder or end.value
            if rank == 0:
                clocks.append(time.perf_counter() - started)
        if questions:
            asked.append(questions[0])
            answers = answers_to(questions)
    started = time.perf_counter()
    decoder(out)
    decoding = time.perf_counter() - started + sum(clocks[1:])
    if codec.feedback:
        kept[:] = gradients
    return correcting + clocks[0], decoding, asked


def correct(codec: Codec, gradients: list[Tensor], states: Sequence[State], places: Sequence[ReduceContext]) -> float:
    """Momenta in the place of gradients, if the codec asks for them; the seconds of the first rank."""
    clocks: list[float] = []
    for gradient, state, context in zip(gradients, states, places, strict=True):
        started = time.perf_counter()
        if codec.correction is not None:
            state.update(codec.correction.apply(gradient, state, context))
        clocks.append(time.perf_counter() - started)
    return clocks[0]
