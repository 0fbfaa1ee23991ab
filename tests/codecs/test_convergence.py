"""Codecs learn what is to be learned; each detector here is shown to see the fault that it is for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import mean
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import syncline
from syncline.bench.learning import momentum_for
from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.codecs.conversation import Conversation, Declaration, Mean, talk
from syncline.codecs.none import NoCodec
from syncline.codecs.onebit import OneBit
from syncline.codecs.quantized import Int8
from syncline.codecs.randomk import RandomK
from syncline.codecs.registry import codec_of
from syncline.codecs.topk import TopK
from syncline.core.parts import Part
from syncline.guards.divergence import digest_of

# Codecs with a fault, which the registry would refuse


class ForgetfulTopK(TopK):
    """Does not keep what it does not send."""

    feedback: ClassVar[bool] = False


class ForgetfulOneBit(OneBit):
    """The same, for signs."""

    def __post_init__(self) -> None: ...


class ScaledAndFedBack(RandomK):
    """Sends each entry larger than it is, and what it has not sent as well."""

    def __post_init__(self) -> None: ...


class Dense(Codec):
    """Sends everything."""

    feedback = False

    def questions(self, parts: Sequence[Part], world: int, step: int) -> tuple[Declaration, ...]:
        return NoCodec().questions(parts, world, step)


class Careless(Dense):
    """Rounds what others are told, and not what rank 1 has itself."""

    name: ClassVar[str] = "careless"

    def reduce(self, values: Tensor, state: State, place: ReduceContext) -> Conversation:
        mean = yield Mean(values.clone())
        values.zero_()
        return lambda out: out.copy_(mean if place.rank == 1 else mean.bfloat16())


class Alone(Dense):
    """Does not listen."""

    name: ClassVar[str] = "alone"

    def reduce(self, values: Tensor, state: State, place: ReduceContext) -> Conversation:
        own = values.clone()
        yield Mean(values)
        return lambda out: out.copy_(own)


class Point(nn.Module):
    """Somewhere; its gradient is whatever is multiplied with it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size))


def descend(
    fabric: syncline.Fabric, codec: str | Codec, slope: Callable[[Tensor, int, int], Tensor], size: int, rates: list
) -> Tensor:
    """Where SGD ends, with the slope that each rank sees in each step."""
    point = Point(size)
    optimizer = torch.optim.SGD(point.parameters(), lr=rates[0])
    syncline.Sync(point, optimizer, fabric=fabric, codec=codec, nonfinite="ignore")
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (point.x * slope(point.x.detach(), step, fabric.rank)).sum().backward()
        optimizer.step()
        point.x.data.clamp_(-1e9, 1e9)
    return point.x.detach().clone()


# A quadratic: one rank in three wants 4, the others -1; the mean of that is 2/3, the majority is not

WORLD = 3
SIZE = 300
WANTED = torch.where(torch.arange(SIZE) % WORLD == torch.arange(WORLD)[:, None], 4.0, -1.0)
OPTIMUM = 2 / 3


def to_wanted(x: Tensor, _: int, rank: int) -> Tensor:
    return x - WANTED[rank]


def suboptimality(codec: str | Codec, rates: list[float]) -> float:
    """Of the loss, 1 at the start."""
    work = partial(descend, codec=codec, slope=to_wanted, size=SIZE, rates=rates)
    ends = syncline.run(work, ranks=WORLD, fabric="threads")
    assert all(torch.equal(ends[0], end) for end in ends)
    return float((ends[0] - OPTIMUM).square().mean()) / OPTIMUM**2


FALLING = [0.02] * 300 + [0.005] * 300


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kept", "forgotten"),
    [
        ("topk:0.05", ForgetfulTopK(0.05)),
        ("topk:0.05,values=int8", ForgetfulTopK(0.05, values="int8")),
        ("onebit", ForgetfulOneBit(feedback=False)),
    ],
    ids=["topk", "topk of int8", "onebit"],
)
def test_what_is_kept_leads_to_the_optimum_and_what_is_forgotten_does_not(kept: str, forgotten: Codec) -> None:
    assert suboptimality(kept, FALLING) < 1e-2
    assert suboptimality(forgotten, FALLING) > 0.3


@pytest.mark.slow
def test_entries_that_are_scaled_and_fed_back_would_diverge() -> None:
    rates = [0.02] * 200
    assert suboptimality("randomk:0.1", rates) < 0.1
    assert suboptimality("randomk:0.1,scaled=true,feedback=false", rates) < 0.1
    assert suboptimality(ScaledAndFedBack(0.1, scaled=True), rates) > 1e3


# Karimireddy's counterexample: mostly -1 and sometimes 4, so that the mean slope is up and the usual sign is down


def mostly_down(x: Tensor, step: int, rank: int) -> Tensor:
    """A gradient of 1/4 on average; beyond 1 either way there is a wall."""
    drawn = torch.rand(len(x), generator=torch.Generator().manual_seed(1000 * step + rank))
    wall = torch.where(x.abs() > 1, 8 * x, torch.zeros(()))
    return torch.where(drawn < 0.25, 4.0, -1.0) + wall


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("codec", "is_right"), [("none", True), ("onebit", True), ("onebit:vote=true,feedback=false", False)]
)
def test_signs_alone_go_the_wrong_way_where_the_mean_and_the_majority_differ(codec: str, is_right: bool) -> None:
    work = partial(descend, codec=codec, slope=mostly_down, size=64, rates=[0.02] * 400)
    end = float(syncline.run(work, ranks=WORLD, fabric="threads")[0].mean())
    assert end < -0.8 if is_right else end > 0.8


# DGC


def whole_numbers(_: Tensor, step: int, rank: int) -> Tensor:
    """Small ones, so that all sums are exact."""
    return torch.randint(-8, 9, (50,), generator=torch.Generator().manual_seed(100 * step + rank)).float()


@pytest.mark.parametrize(("masking", "momentum"), [("false", 0.5), ("true", 0.0)])
def test_dgc_that_sends_everything_is_momentum_sgd_exactly_and_plain_sgd_with_masking(
    masking: str, momentum: float
) -> None:
    codec = f"dgc:1.0,momentum=0.5,masking={masking}"
    ends = syncline.run(
        partial(descend, codec=codec, slope=whole_numbers, size=50, rates=[0.125] * 10), ranks=2, fabric="threads"
    )
    point = torch.zeros(50, requires_grad=True)
    optimizer = torch.optim.SGD([point], lr=0.125, momentum=momentum)
    for step in range(10):
        point.grad = (whole_numbers(point, step, 0) + whole_numbers(point, step, 1)) / 2
        optimizer.step()
    assert torch.equal(ends[0], point.detach())
    assert torch.equal(ends[1], point.detach())


# PowerSGD


def repeated(codec: Codec, matrices: list[Tensor], times: int, is_warm: bool) -> Tensor:
    """The mean that ranks with these matrices end with; nothing is kept but, when warm, where the next step starts."""
    parts = (Part("matrix", 0, matrices[0].numel(), matrices[0].shape),)
    states = [codec.start(parts, torch.device("cpu")) for _ in matrices]
    mean = torch.empty(matrices[0].numel())
    for step in range(times):
        if not is_warm:
            states = [codec.start(parts, torch.device("cpu")) for _ in matrices]
        places = [ReduceContext(rank, len(matrices), step, 0, parts) for rank in range(len(matrices))]
        values = [matrix.flatten() for matrix in copy.deepcopy(matrices)]
        talks = [codec.reduce(*given) for given in zip(values, states, places, strict=True)]
        talk(talks)[0](mean)
    return mean.view(matrices[0].shape)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_finds_the_best_approximation_over_steps_because_it_goes_on_where_it_was(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.linalg.qr(torch.randn(size, 30, generator=generator)).Q for size in (40, 30))
    exact = left @ torch.diag(0.8 ** torch.arange(30.0)) @ right.T
    noise = torch.randn(3, 40, 30, generator=generator)
    matrices = list(exact + noise - noise.mean(0))
    best = float(torch.linalg.svdvals(exact)[rank:].norm())
    codec = codec_of(f"powersgd:{rank}")
    warm = float((repeated(codec, matrices, 60, True) - exact).norm()) / best
    cold = float((repeated(codec, matrices, 1, False) - exact).norm()) / best
    assert warm == pytest.approx(1, abs=1e-3)
    assert cold > 1.02


# Stochastic rounding


def variance_of_the_mean(codec: Int8, ranks: list[int], values: Tensor) -> float:
    """Of what these ranks say of the same values, over steps."""
    parts = (Part("values", 0, len(values), values.shape),)

    def said(rank: int, step: int) -> Tensor:
        out = torch.empty_like(values)
        codec.decode(codec.take(values.clone(), 0, ReduceContext(rank, 8, step, 0, parts)), out)
        return out

    means = torch.stack([torch.stack([said(rank, step) for rank in ranks]).mean(0) for step in range(60)])
    return float(means.var(0).mean())


@pytest.mark.parametrize("text", ["int8:rounding=stochastic", "int4:rounding=stochastic"])
def test_rounding_errors_of_ranks_cancel_because_each_draws_its_own(text: str) -> None:
    codec = codec_of(text)
    assert isinstance(codec, Int8)
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    one = variance_of_the_mean(codec, [0], values)
    assert variance_of_the_mean(codec, list(range(8)), values) == pytest.approx(one / 8, rel=0.1)
    assert variance_of_the_mean(codec, [0] * 8, values) == pytest.approx(one, rel=0.1)


# A small real task: a network learns what another one does

EVERY_CODEC = ("fp16", "bf16", "int8", "int8:rounding=stochastic", "int4", "onebit", "onebit:vote=true,feedback=false")
EVERY_CODEC += ("topk:0.1", "topk:0.1,values=int8,select=sampled", "randomk:0.1", "powersgd:2", "dgc:0.1,warmup=20")
EVERY_CODEC += ("randomk:0.5,scaled=true,feedback=false", "warmup:steps=20,codec=(topk:0.1)")
EVERY_CODEC += ("rules:codec=(int4),below=100",)


NOISE = 0.15


def quick_and_slow(codecs: Sequence[str], quick: Sequence[str]) -> list[Any]:
    """Those that are tried every time, and those that wait for `make test-all`."""
    return [pytest.param(codec, marks=[] if codec in quick else [pytest.mark.slow]) for codec in codecs]


def network(width: int, seed: int) -> nn.Sequential:
    """Made where no rank runs, as threads share the random numbers of torch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 20), nn.Tanh(), nn.Linear(20, 3))


def learn(
    fabric: syncline.Fabric, pupil: nn.Module, teacher: nn.Module, codec: str | Codec, steps: int, rate: float
) -> tuple[list[int], float]:
    """Digests of the weights, and the loss on inputs that no rank has seen."""
    pupil = copy.deepcopy(pupil)
    chosen = codec_of(codec)
    optimizer = torch.optim.SGD(pupil.parameters(), lr=rate, momentum=momentum_for(chosen))
    syncline.Sync(
        pupil, optimizer, fabric=fabric, codec=chosen, bucket_bytes=2000, first_bucket_bytes=500, divergence_guard=False
    )
    for step in range(steps):
        if step == 3 * steps // 4:
            optimizer.param_groups[0]["lr"] = rate / 10
        x, y = lesson(teacher, 16, 10 * step + fabric.rank, fabric.rank % 2)
        optimizer.zero_grad()
        (pupil(x) - y).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        lessons = [lesson(teacher, 500, 10**6 + half, half) for half in range(2)]
        return [digest_of(p) for p in pupil.parameters()], mean(
            float((pupil(x) - y).square().mean()) for x, y in lessons
        )


def lesson(teacher: nn.Module, count: int, seed: int, half: int) -> tuple[Tensor, Tensor]:
    """Inputs of which one half is silent, so that a rank never sees what the next one sees, and the teacher's word."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=generator)
    x[:, 6 * half : 6 * half + 6] = 0
    noise = torch.randn(count, 3, generator=generator)
    return x, teacher(x).detach() + NOISE * noise


def taught(codec: str | Codec, seed: int, steps: int, ranks: int, rate: float = 0.05) -> list[tuple[list[int], float]]:
    pupil, teacher = network(32, seed), network(24, 100 + seed)
    work = partial(learn, pupil=pupil, teacher=teacher, codec=codec, steps=steps, rate=rate)
    return syncline.run(work, ranks=ranks, fabric="threads")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", quick_and_slow(EVERY_CODEC, quick=("topk:0.1", "powersgd:2", "dgc:0.1,warmup=20")))
def test_after_200_steps_all_ranks_have_the_same_bits(codec: str) -> None:
    first, *others = (digests for digests, _ in taught(codec, 0, 200, 3))
    assert others == [first, first]


@pytest.mark.parametrize("codec", [Careless(), Alone()], ids=["careless", "alone"])
def test_ranks_that_differ_in_a_bit_are_seen(codec: Codec) -> None:
    first, *others = (digests for digests, _ in taught(codec, 0, 5, 3))
    assert others != [first, first]


@cache
def mean_loss(codec: str | Codec, rate: float = 0.05) -> float:
    return mean(taught(codec, seed, 300, 2, rate)[0][1] for seed in range(3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", quick_and_slow(("int8", "topk:0.1", "powersgd:4", "dgc:0.1"), quick=("topk:0.1",)))
def test_a_real_task_is_learned_as_well_as_without_a_codec(codec: str) -> None:
    assert mean_loss(codec) < 1.05 * mean_loss("none")


@pytest.mark.slow
def test_signs_learn_as_well_at_a_rate_that_is_not_at_the_edge() -> None:
    """Their steps come late, which with momentum is unstable at a high rate (docs/codecs.md)."""
    assert mean_loss("onebit", 0.02) < 1.05 * mean_loss("none", 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Alone()], ids=["alone"])
def test_a_codec_with_a_fault_learns_less(codec: Codec) -> None:
    assert mean_loss(codec) > 1.05 * mean_loss("none")
