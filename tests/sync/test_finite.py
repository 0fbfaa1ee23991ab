"""Gradients that are not finite: all ranks skip the step together, or raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

import syncline
from support import guarded
from support.guarded import Spoils, SpoilsTable, Trained, Words, batch, filled, train, words
from support.references import same_bits
from support.replicas import DTYPES, WORLD, assert_replicas, same, train_threads
from syncline import Deadlines
from syncline.guards.finite import harm_done, is_finite


def without_steps(rank: int, step: int) -> Tensor:
    """The batches of `batch` without those of steps 2 and 4."""
    return batch(rank, (1, 3, 5)[step - 1])


@cache
def without_bad_steps(fabric: str) -> Trained:
    """What becomes of the parameters when those batches are left out."""
    return syncline.run(partial(train, steps=3, data=without_steps), WORLD, fabric, Deadlines(20.0))[0]


def train_with_closures(fabric: syncline.Fabric, bad: int | None, make: Callable) -> list[Tensor]:
    """Parameters after every step; rank 1 has a bad batch in one of them."""
    model = guarded.filled(guarded.Net())
    optimizer = make(model.parameters())
    syncline.Sync(model, optimizer, fabric=fabric)
    after = []
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(fabric.rank, step)).square().mean()
            loss = loss * torch.nan if (fabric.rank, step) == (1, bad) else loss
            loss.backward()
            return fabric.all_reduce(loss.detach().clone(), op="mean")

        optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        after.append(torch.cat([part.flatten() for part in guarded.snapshot(model)]))
    return after


@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize(
    "make", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.LBFGS], ids=["SGD", "LBFGS"]
)
def test_a_bad_gradient_of_a_closure_is_not_used(make: Callable, bad: int) -> None:
    one, other = syncline.run(partial(train_with_closures, bad=bad, make=make), WORLD, "threads", Deadlines(20.0))[:2]
    before = torch.cat([part.flatten() for part in guarded.snapshot(guarded.filled(guarded.Net()))])
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert same_bits(mine, theirs)
        assert bool(mine.isfinite().all())
        assert same_bits(mine, before) == (step == bad)
        before = mine


@pytest.mark.parametrize(
    ("fabric", "factor"),
    [
        ("threads", torch.nan),
        ("threads", torch.inf),
        ("shm", torch.nan),
        pytest.param("shm", torch.inf, marks=pytest.mark.slow),
        pytest.param("torch", torch.inf, marks=pytest.mark.slow),
        pytest.param("torch", torch.nan, marks=pytest.mark.slow),
    ],
)
def test_a_bad_gradient_on_one_rank_lets_every_rank_skip_as_if_the_step_had_never_been(
    fabric: str, factor: float
) -> None:
    work = partial(train, steps=5, poison=Spoils(1, (2, 4), factor))
    ranks = syncline.run(work, WORLD, fabric, Deadlines(20.0))
    assert_replicas(ranks)
    for step in range(1, 6):
        before, after = ranks[0].parameters[step - 1 : step + 1]
        assert same(before, after) == (step in (2, 4))
    assert same(ranks[0].states[0], ranks[0].states[1])
    expected = without_bad_steps(fabric)
    assert same(ranks[0].at_the_end, expected.at_the_end)
    assert same(ranks[0].states[-1], expected.states[-1])
    assert [rank.totals.skipped for rank in ranks] == [2] * WORLD


def test_gradients_are_given_back_after_a_skipped_step() -> None:
    for rank in train_threads(3, poison=Spoils(1, (2,), torch.nan)):
        assert all(gradient is not None for gradients in rank.gradients for gradient in gradients)
        finite = [all(map(is_finite, gradients)) for gradients in rank.gradients]
        assert finite == [True, False, True]


def test_a_bad_gradient_raises_on_every_rank_where_that_was_asked_for() -> None:
    for rank in train_threads(4, poison=Spoils(2, (3,), torch.inf), nonfinite="raise"):
        assert rank.error == "NonFiniteGradient"
        assert "the gradient of third.bias is not finite" in rank.message
        assert len(rank.parameters) == 3
        assert same(rank.at_the_end, rank.parameters[-1])


@pytest.mark.parametrize("most_skips", [0, 1, 3])
def test_more_bad_steps_in_a_row_than_allowed_raise_on_every_rank(most_skips: int) -> None:
    ranks = train_threads(9, poison=Spoils(0, tuple(range(2, 10)), torch.nan), most_skips=most_skips)
    for rank in ranks:
        assert rank.error == "NonFiniteGradient"
        assert f"{most_skips + 1} steps in a row" in rank.message
        assert len(rank.parameters) == 2 + most_skips
        assert same(rank.at_the_end, rank.parameters[1])
    assert_replicas(ranks)


def test_a_good_step_between_bad_ones_starts_the_count_again() -> None:
    for rank in train_threads(7, poison=Spoils(0, (2, 3, 5, 6), torch.nan), most_skips=2):
        assert (rank.error, rank.totals.skipped) == ("", 4)


def test_bad_gradients_are_used_where_that_was_asked_for() -> None:
    ranks = train_threads(3, poison=Spoils(1, (2,), torch.nan), nonfinite="ignore")
    assert_replicas(ranks)
    for rank in ranks:
        assert rank.totals.skipped == 0
        assert all(is_finite(parameter) for parameter in rank.parameters[1])
        assert all(parameter.isnan().all() for parameter in rank.at_the_end)


@pytest.mark.parametrize("factor", [torch.nan, torch.inf])
def test_a_bad_sparse_gradient_on_one_rank_lets_every_rank_skip(factor: float) -> None:
    ranks = train_threads(
        4,
        build=Words,
        data=words,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        before_step=SpoilsTable(rank=2, step=3, factor=factor),
    )
    assert_replicas(ranks)
    for rank in ranks:
        assert (rank.error, rank.totals.skipped) == ("", 1)
        for step in range(1, 5):
            assert same(rank.parameters[step - 1], rank.parameters[step]) == (step == 3)
        table = rank.gradients[2][0]
        assert table.is_sparse
        assert not is_finite(table.coalesce().values())


def test_a_bad_sparse_gradient_is_named() -> None:
    spoils = SpoilsTable(rank=0, step=2, factor=torch.nan)
    sgd = partial(torch.optim.SGD, lr=0.1)
    for rank in train_threads(3, build=Words, data=words, optimizer=sgd, before_step=spoils, nonfinite="raise"):
        assert rank.error == "NonFiniteGradient"
        assert "the gradient of table.weight is not finite" in rank.message


def test_every_optimizer_skips_a_bad_step_and_it_counts_once() -> None:
    work = partial(guarded.train_with_two_optimizers, steps=3, poison=Spoils(1, (2,), torch.nan), most_skips=1)
    ranks = syncline.run(work, WORLD, "threads", Deadlines(20.0))
    assert_replicas(ranks)
    for rank in ranks:
        assert rank.error == "", rank.message
        assert same(rank.parameters[1], rank.parameters[2])
        assert not any(map(same_bits, rank.parameters[2], rank.parameters[3]))


def train_halves(fabric: syncline.Fabric, codec: str, largest: float) -> tuple[list[list[Tensor]], Tensor]:
    """Gradients of 16 bits, the same direction in every step, so that what is kept grows: of every step that was made,
    the gradient of this rank and the one that was used; and what is kept at the end. A skipped step keeps nothing."""
    model = filled(nn.Linear(50, 1, bias=False).half())
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-20)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, most_skips=1000)
    draws = torch.Generator().manual_seed(fabric.rank)
    gradient = (largest * torch.rand(50, generator=draws)).half()
    used = []
    for _ in range(40):
        before = sync.state_dict()["codec_state"]
        optimizer.zero_grad()
        (model.weight * gradient).sum().backward()
        optimizer.step()
        after = sync.state_dict()["codec_state"]
        if sync.skips:
            assert all(
                same_bits(before[kind][key], after[kind][key]) for kind in ("residual", "state") for key in after[kind]
            )
        else:
            used.append([gradient.float(), model.weight.grad.float().flatten().clone()])
    assert bool(model.weight.isfinite().all())
    return used, after.get("residual", {}).get("weight", torch.zeros(50))


@pytest.mark.parametrize("codec", ["topk:0.1", "topk:0.1,values=int8", "randomk:0.1", "dgc:0.1,warmup=0"])
def test_what_16_bits_cannot_hold_with_what_was_kept_is_sent_later(codec: str) -> None:
    """What was sent plus what was kept is the gradient, to the rounding of 16 bits."""
    work = partial(train_halves, codec=codec, largest=20000.0)
    ranks = syncline.run(work, WORLD, "threads", Deadlines(20.0))
    assert [len(used) for used, _ in ranks] == [40] * WORLD
    if not codec.startswith("dgc"):  # which has momentum
        gradients = sum(gradient for used, _ in ranks for gradient, _ in used) / WORLD
        sent = sum(mean for _, mean in ranks[0][0])
        kept = sum(kept for _, kept in ranks) / WORLD
        torch.testing.assert_close(sent + kept, gradients, rtol=2**-10, atol=1.0)


def test_a_mean_that_16_bits_cannot_hold_is_skipped_by_all() -> None:
    """A codec that keeps nothing cannot send it later."""
    work = partial(train_halves, codec="randomk:0.1,scaled=true,feedback=false", largest=9000.0)
    made = [len(used) for used, _ in syncline.run(work, WORLD, "threads", Deadlines(20.0))]
    assert 0 < made[0] < 40
    assert made == [made[0]] * WORLD


@pytest.mark.parametrize("codec", ["none", "fp16", "topk:1"])
def test_sums_over_ranks_may_be_larger_than_16_bits_can_hold(codec: str) -> None:
    ranks = syncline.run(partial(train_halves, codec=codec, largest=20000.0), 8, "threads", Deadlines(20.0))
    expected = sum(used[0][0] for used, _ in ranks) / 8
    for used, _ in ranks:
        assert len(used) == 40
        assert all(same_bits(mean, expected.half().float()) for _, mean in used)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_overflows_is_finite_where_its_elements_are(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    assert is_finite(torch.full((1000,), most, dtype=dtype))
    assert is_finite(torch.full((1000,), -most, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [[torch.nan], [torch.inf], [-torch.inf], [torch.inf, -torch.inf]])
@pytest.mark.parametrize("fill", [0.0, 1.0, "most"])
def test_one_element_that_is_not_finite_is_found_anywhere(dtype: torch.dtype, bad: list[float], fill: object) -> None:
    usual = torch.finfo(dtype).max if fill == "most" else fill
    for place in (0, 7, 100, 999 - len(bad)):
        values = torch.full((1000,), usual, dtype=dtype)
        values[place : place + len(bad)] = torch.tensor(bad, dtype=dtype)
        assert not is_finite(values)


def test_nothing_is_finite() -> None:
    assert is_finite(torch.zeros(0))


# Parameters that a huge step has moved


@dataclass(frozen=True)
class Enlarges:
    """The gradients of all ranks are finite and huge in one step, and learning rates are as usual."""

    step: int
    factor: float

    def __call__(self, rank: int, step: int, model: nn.Module, loss: Tensor) -> Tensor:
        return loss * self.factor if step == self.step else loss


PLAIN = partial(torch.optim.SGD, lr=1.0)


@pytest.mark.parametrize("mode", ["sync", "delayed", "local:1", "diloco:2", "bounded:ahead=0"])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_gradients_that_are_not_finite_after_a_huge_step_are_blamed_on_it(mode: str, policy: str) -> None:
    poison = Enlarges(2, 1e30)
    ranks = train_threads(20, poison=poison, optimizer=PLAIN, data=far_batch, mode=mode, nonfinite=policy, most_skips=3)
    for rank in ranks:
        assert rank.error == "NonFiniteGradient"
        assert "itself is as large as" in rank.message
        assert "an earlier step moved it there, with gradients that were finite but huge" in rank.message
        assert "Load the last checkpoint, and clip gradients" in rank.message
        assert ("4 steps in a row" if policy == "skip" else "1 steps in a row") in rank.message


def far_batch(rank: int, step: int) -> Tensor:
    """So large that outputs overflow with parameters of 1e30."""
    return 1e10 * batch(rank, step)


def test_the_first_warning_tells_of_the_huge_step(caplog: pytest.LogCaptureFixture) -> None:
    train_threads(20, poison=Enlarges(2, 1e30), optimizer=PLAIN, data=far_batch, most_skips=3)
    said = [record.getMessage() for record in caplog.records]
    assert sum("an earlier step moved it there" in text for text in said) == WORLD
    assert sum("this step is skipped" in text for text in said) == 3 * WORLD


@dataclass(frozen=True)
class Replaces:
    """Part of a parameter is another number from one step on."""

    step: int
    value: float

    def __call__(self, rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == self.step:
            with torch.no_grad():
                model.second.weight[0] = self.value


@pytest.mark.parametrize("mode", ["sync", "delayed"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_parameters_that_are_not_finite_raise_at_once_on_every_rank(mode: str, value: float) -> None:
    spoil = Replaces(3, value)
    for rank in train_threads(9, before_step=spoil, poison=Spoils(0, (3,), torch.nan), mode=mode):
        assert rank.error == "NonFiniteGradient"
        assert "none can be good any more: second.weight itself is not finite" in rank.message
        assert len(rank.parameters) == (3 if mode == "sync" else 4)


def test_a_server_whose_parameters_are_not_finite_is_not_waited_for() -> None:
    """The step that spoils parameters is finite: it is in what servers have."""
    poison = Enlarges(1, 1e37)
    for rank in train_threads(20, poison=poison, optimizer=partial(PLAIN, lr=1e4), mode="bounded:ahead=0"):
        assert rank.error == "NonFiniteGradient"
        assert "none can be good any more" in rank.message
        assert len(rank.parameters) == 2


def test_a_rank_whose_parameters_are_not_finite_is_mended_when_ranks_meet() -> None:
    """Steps that are skipped until then are its own."""

    def spoil(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if (rank, step) == (1, 2):
            Replaces(2, torch.nan)(rank, step, model, optimizer)

    for rank in train_threads(8, before_step=spoil, mode="local:4"):
        assert rank.error == ""
        assert all(map(is_finite, rank.at_the_end))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_usual_sizes_are_blamed_for_nothing(dtype: torch.dtype) -> None:
    usual = {"weight": torch.tensor([1000.0, -0.5], dtype=dtype), "empty": torch.zeros(0, dtype=dtype)}
    assert harm_done(usual.items()) == ""
    assert harm_done([*usual.items(), ("large", torch.tensor([-3e4], dtype=dtype) * 100)], is_mended=True)


def test_no_parameters_do_no_harm() -> None:
    assert harm_done([]) == ""
