"""Ranks that train alone and meet: when they do, what they take along, and what befalls one of them only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import syncline
from support.batches import Batch, fill
from support.losses import squared
from support.models import frozen_below, mlp, normalized
from support.on_a_line import RATE, START, Line
from support.references import same_bits
from support.trainees import ADAM, DEADLINES, HEAVY, PLAIN, Alone, Trainee, place_of, start
from syncline.errors import NonFiniteGradient, RankFailed
from syncline.fabric.threads import Threads

FAMILY = ("local:every=3", "slowmo:every=3", "diloco:every=3")


def on_ranks(work: Callable[[syncline.Fabric], object], world: int = 2, fabric: str | Threads = "threads") -> list:
    return syncline.run(work, world, fabric, DEADLINES)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def alike(places: list[Tensor]) -> bool:
    return all(same_bits(places[0], other) for other in places[1:])


# Several optimizers


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("mode", FAMILY)
def test_a_nan_is_of_the_optimizer_whose_turn_it_is(mode: str, bad: int) -> None:
    def work(fabric: syncline.Fabric) -> list[bool]:
        model = fill(nn.ModuleList(nn.Linear(2, 1) for _ in range(2)), seed=0)
        optimizers, before = [PLAIN(part.parameters()) for part in model], [place_of(part) for part in model]
        syncline.Sync(model, optimizers, fabric=fabric, mode=mode)
        for turn, part in enumerate(model):
            model.zero_grad()
            (part(torch.ones(1, 2)).sum() * (torch.nan if (turn, fabric.rank) == (bad, 1) else 1.0)).backward()
            optimizers[turn].step()
        assert all(place_of(part).isfinite().all() for part in model)
        return [not same_bits(place_of(part), then) for part, then in zip(model, before, strict=True)]

    first, second = on_ranks(work)
    assert first == [True, True]
    assert second == [bad == 1, bad == 0]


@pytest.mark.parametrize("turns", [(0,), (0, 1, 0)])
@pytest.mark.parametrize("mode", FAMILY)
def test_ranks_are_equal_after_drain_also_when_an_optimizer_has_yet_to_have_its_turn(
    mode: str, turns: tuple[int, ...]
) -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        model = fill(nn.ModuleList(nn.Linear(2, 1) for _ in range(2)), seed=0)
        optimizers = [PLAIN(part.parameters()) for part in model]
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode=mode)
        for turn in turns:
            model.zero_grad()
            model[turn](torch.full((1, 2), 1.0 + fabric.rank)).sum().backward()
            optimizers[turn].step()
        sync.drain()
        return place_of(model)

    assert alike(on_ranks(work))


@pytest.mark.parametrize("mode", FAMILY)
def test_a_run_that_goes_on_in_mid_round_synchronizes_when_it_would_have(mode: str) -> None:
    def work(fabric: syncline.Fabric, resumed: bool) -> Tensor:
        model = fill(nn.ModuleList(nn.Linear(2, 1) for _ in range(2)), seed=0)
        optimizers = [PLAIN(part.parameters()) for part in model]
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode=mode)
        for turn in range(11):
            if resumed and turn == 3:
                saved = deepcopy(sync.state_dict())
                sync.close()
                sync = syncline.Sync(model, optimizers, fabric=fabric, mode=mode)
                sync.load_state_dict(saved)
            model.zero_grad()
            model[turn % 2](torch.full((1, 2), 1.0 + fabric.rank + turn)).square().sum().backward()
            optimizers[turn % 2].step()
        return place_of(model)

    resumed, whole = [on_ranks(lambda fabric, does=does: work(fabric, does)) for does in (True, False)]
    assert all(map(same_bits, resumed, whole))


# When ranks meet


@pytest.mark.parametrize("codec", ["none", "topk:0.3"])
@pytest.mark.parametrize("mode", ["local:every=4,warmup=5", "slowmo:every=4,warmup=5", "diloco:every=4,warmup=5"])
def test_the_warm_up_is_synchronous_and_periods_are_counted_from_its_end(mode: str, codec: str) -> None:
    def work(fabric: syncline.Fabric, mode: str) -> list[Tensor]:
        trainee = Trainee(fabric, mode, ADAM, codec=codec)
        return trainee.train(14)

    ranks = on_ranks(lambda fabric: work(fabric, mode))
    synchronous = on_ranks(lambda fabric: work(fabric, "sync"))
    assert all(same_bits(one, other) for one, other in zip(ranks[0][:5], synchronous[0][:5], strict=True))
    assert [alike(list(places)) for places in zip(*ranks, strict=True)] == [
        step <= 5 or (step - 5) % 4 == 0 for step in range(1, 15)
    ]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("local:every=3", [3, 6, 9, 12, 15, 18]),
        ("local:every=2,warmup=3", [5, 7, 9, 11, 13, 15, 17, 19]),
        ("local:every=2,growth=1.5", [2, 5, 9, 15]),  # 2, 3, 4, 6, 9
        ("local:every=1,growth=1.5", list(range(1, 21))),  # int(1.5) never grows
        ("local:every=2,growth=2,longest=6", [2, 6, 12, 18]),
        ("diloco:every=6,fragments=3,delay=1", [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
    ],
)
def test_ranks_meet_at_exactly_these_steps(mode: str, expected: list[int]) -> None:
    def work(fabric: syncline.Fabric) -> list[int]:
        trainee = Trainee(fabric, mode)
        met, before = [], 0
        for step in range(1, 21):
            trainee.step()
            if trainee.sync.driver.meetings != before:
                met.append(step)
            before = trainee.sync.driver.meetings
        return met

    assert on_ranks(work) == [expected] * 2


@pytest.mark.parametrize("mode", [*FAMILY, "diloco:every=4,fragments=2,delay=1,merge=0.5"])
def test_draining_again_changes_nothing_and_the_next_period_is_whole(mode: str) -> None:
    """An outer optimizer would make a step with nothing but its momentum."""

    def work(fabric: syncline.Fabric) -> tuple[list[Tensor], list[bool]]:
        trainee = Trainee(fabric, mode)
        trainee.train(4)
        drained = [trainee.drained(), trainee.drained()]
        before = trainee.sync.driver.meetings
        meets = []
        for _ in range(3):
            trainee.step()
            meets.append(trainee.sync.driver.meetings > before)
        return drained, meets

    turn = 2 if "fragments" in mode else 3
    for drained, meets in on_ranks(work):
        assert same_bits(*drained)
        assert meets == [step >= turn for step in range(1, 4)]


def test_draining_right_after_a_meeting_is_no_meeting() -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, Tensor]:
        trainee = Trainee(fabric, "diloco:every=3")
        return trainee.train(6)[-1], trainee.drained()

    for met, drained in on_ranks(work):
        assert same_bits(met, drained)


# What they take along


@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
def test_states_of_optimizers_are_kept_averaged_or_forgotten(policy: str) -> None:
    def work(fabric: syncline.Fabric) -> tuple[list[Tensor], list[Tensor], Tensor]:
        trainee = Trainee(fabric, f"local:every=3,optimizer={policy}", ADAM)
        trainee.train(2)
        with trainee.sync.no_sync():
            trainee.train(1)
        met = trainee.state()
        return met, trainee.state(), trainee.step()

    ranks = Alone(2, ADAM)
    ranks.train(3)
    ranks.average()
    own = [[v for state in optimizer.state.values() for v in state.values()] for optimizer in ranks.optimizers]
    for number, (met, _, _) in enumerate(on_ranks(work)):
        expected = {
            "keep": own[number],
            "average": [(one + other) / 2 for one, other in zip(*own, strict=True)],
            "reset": [],
        }[policy]
        assert len(met) == len(expected)
        for one, other in zip(met, expected, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("policy", ["broadcast", "average", "local"])
def test_buffers_are_those_of_rank_0_means_or_everyones_own(policy: str) -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        model = fill(normalized(), seed=0)
        optimizer = PLAIN(model.parameters())
        syncline.Sync(model, optimizer, fabric=fabric, mode="local:every=2", buffers=policy)
        for step in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(squared(model, Batch(fabric.rank, step)))
            optimizer.step()
        return [buffer.double().clone() for buffer in model.buffers()]

    alone = []
    for rank in range(3):
        model = fill(normalized(), seed=0)
        optimizer = PLAIN(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(squared(model, Batch(rank, step)))
            optimizer.step()
        alone.append([buffer.double().clone() for buffer in model.buffers()])
    means = [torch.stack(each).mean(0) for each in zip(*alone, strict=True)]
    assert not same_bits(alone[0][0], alone[1][0])
    for rank, buffers in enumerate(on_ranks(work, 3)):
        expected = {"broadcast": alone[0], "average": means, "local": alone[rank]}[policy]
        for one, other in zip(buffers, expected, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "onebit"])
@pytest.mark.parametrize("mode", ["local:every=1", "diloco:every=1,lr=1,momentum=0"])
def test_how_far_ranks_have_come_is_what_was_said_and_what_is_kept(mode: str, codec: str) -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, Tensor, Tensor]:
        trainee = Trainee(fabric, mode, PLAIN, codec=codec)
        began, walked = trainee.place(), torch.zeros_like(trainee.place())
        for _ in range(12):
            trainee.step()
            walked += 0.1 * torch.cat([p.grad.flatten() for p in trainee.model.parameters()])
        kept = trainee.sync.state_dict()["codec_state"]["residual"]
        left = torch.cat([kept[name].flatten() for name, _ in trainee.model.named_parameters()])
        return walked, began - trainee.place(), left

    walked, moved, left = (torch.stack(each).double().mean(0) for each in zip(*on_ranks(work, 3), strict=True))
    assert_close(moved + left, walked, 1e-5)
    assert left.norm() > 1e-3 * walked.norm()


def test_parameters_of_16_bits_are_measured_from_an_anchor_of_32() -> None:
    """Steps of less than a bit of bfloat16 add up in the anchor."""

    def work(fabric: syncline.Fabric) -> tuple[torch.dtype, list[float], list[float]]:
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="diloco:every=1,lr=0.1,momentum=0")
        anchor, weights, anchors = sync.driver.anchors.places["weight"], [], []
        for _ in range(8):
            optimizer.zero_grad()
            model.weight.grad = torch.full_like(model.weight, 0.0078125)  # one bit below 1
            optimizer.step()
            weights.append(model.weight.item())
            anchors.append(anchor.item())
        return anchor.dtype, weights, anchors

    for dtype, weights, anchors in on_ranks(work):
        assert dtype == torch.float32
        assert weights[0] == 1.0  # 1 - 0.00078 is 1 in bfloat16
        assert weights[-1] < 1.0
        assert all(later < earlier for earlier, later in itertools.pairwise(anchors))


def test_frozen_parameters_do_not_travel_and_may_not_be_unfrozen() -> None:
    def work(fabric: syncline.Fabric, unfreezes: bool) -> tuple[set[str], Tensor]:
        trainee = Trainee(fabric, "local:every=2", build=frozen_below)
        travelling = {slot.name for part in trainee.sync.driver.exchange.fragments for slot in part.slots}
        trainee.train(2)
        trainee.model.requires_grad_(unfreezes)
        if unfreezes:
            trainee.train(2)
        return travelling, trainee.place()

    ranks = on_ranks(lambda fabric: work(fabric, False))
    assert ranks[0][0] == {"4.weight", "4.bias"}
    assert alike([place for _, place in ranks])
    with pytest.raises(RankFailed, match=r"0.weight needs a gradient now, but was frozen.*make another"):
        on_ranks(lambda fabric: work(fabric, True))


def test_two_optimizers_make_one_step() -> None:
    def work(fabric: syncline.Fabric) -> tuple[int, Tensor]:
        model = fill(mlp(), seed=0)
        optimizers = [HEAVY(model[:3].parameters()), ADAM(model[3:].parameters())]
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode="local:every=2")
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.autograd.backward(squared(model, Batch(fabric.rank, step)))
            for optimizer in optimizers:
                optimizer.step()
        return sync.driver.meetings, place_of(model)

    ranks = on_ranks(work, 3)
    assert [meetings for meetings, _ in ranks] == [2, 2, 2]
    assert alike([place for _, place in ranks])


# What befalls one rank


@pytest.mark.parametrize("mode", FAMILY)
def test_a_scaler_that_leaves_out_a_step_on_one_rank_leaves_meetings_in_step(mode: str) -> None:
    def work(fabric: syncline.Fabric) -> tuple[list[int], list[Tensor]]:
        trainee = Trainee(fabric, mode, scale=1024.0, check_every=1)
        meetings, path = [], []
        for step in range(9):
            path.append(trainee.step(torch.inf if (fabric.rank, step) in ((1, 1), (0, 5)) else 1.0))
            meetings.append(trainee.sync.driver.meetings)
        trainee.sync.close()
        assert "update" not in vars(trainee.scaler)  # it is the scaler's own again
        return meetings, path

    ranks = on_ranks(work)
    assert ranks[0][0] == ranks[1][0] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    for meeting in (2, 5, 8):
        assert alike([path[meeting] for _, path in ranks])
    assert same_bits(ranks[1][1][0], ranks[1][1][1])
    assert not same_bits(ranks[0][1][0], ranks[0][1][1])


@pytest.mark.parametrize("mode", FAMILY)
def test_a_nan_gradient_is_skipped_where_it_is(mode: str) -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        trainee = Trainee(fabric, mode)
        return [trainee.step(torch.nan if (fabric.rank, step) == (1, 1) else 1.0) for step in range(6)]

    ranks = on_ranks(work)
    assert same_bits(ranks[1][0], ranks[1][1])
    assert not same_bits(ranks[0][0], ranks[0][1])
    for meeting in (2, 5):
        assert alike([path[meeting] for path in ranks])
        assert ranks[0][meeting].isfinite().all()


def test_a_step_without_a_nan_gradient_is_as_if_it_had_not_been() -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "local:every=3", ADAM)
        return [trainee.step(torch.nan if (fabric.rank, step) == (1, 1) else 1.0) for step in range(3)][-1]

    models = [start(), start()]
    optimizers = [ADAM(model.parameters()) for model in models]
    for rank, steps in enumerate(((0, 1, 2), (0, 2))):
        for step in steps:
            optimizers[rank].zero_grad()
            torch.autograd.backward(squared(models[rank], Batch(rank, step)))
            optimizers[rank].step()
    assert_close(on_ranks(work)[0], (place_of(models[0]) + place_of(models[1])) / 2)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("mode", [*FAMILY, "local:every=3,optimizer=average", "diloco:every=3,delay=1,merge=0.5"])
def test_a_rank_with_nan_parameters_takes_the_mean_of_the_others(mode: str, codec: str) -> None:
    def work(fabric: syncline.Fabric, broken: int) -> tuple[list[Tensor], list[Tensor]]:
        trainee = Trainee(fabric, mode, ADAM, codec=codec)
        path = trainee.train(1)
        if fabric.rank == broken:
            with torch.no_grad():
                trainee.model[2].weight[0, 0] = torch.nan
            trainee.optimizer.state[trainee.model[2].weight]["exp_avg"].fill_(torch.nan)
        path += trainee.train(8)
        return path, trainee.state()

    ranks = on_ranks(lambda fabric: work(fabric, 1), 3)
    for meeting in (2, 5, 8):
        if "merge" not in mode:
            assert alike([path[meeting] for path, _ in ranks])
        assert all(path[meeting].isfinite().all() for path, _ in ranks)
    assert all(tensor.isfinite().all() for _, state in ranks for tensor in state)
    if mode.endswith("average"):  # one broken state spoils no others: they have 6, 3 and 6 steps at the second meeting
        assert [state[0].item() for _, state in ranks] == [8.0] * 3
    if mode == "local:every=3" and codec == "none":
        others = Alone(3, ADAM)
        others.train(3)
        assert_close(ranks[1][0][2], (others.places()[0] + others.places()[2]) / 2)
        kept = len(ranks[0][1])
        assert kept == len(ranks[2][1]) == len(ranks[1][1])
        assert ranks[0][1][0] == 9.0  # steps of a rank that was not broken
        assert ranks[1][1][0] == 6.0  # the broken one began anew after the first meeting


SLOPES = (1.0, 2.0, 3.0)
LARGE = 1e37  # finite, but sums over a bucket and all ranks may not be


def descend(
    fabric: syncline.Fabric, mode: str, codec: str, change: Callable[[int, int], float], steps: int, **settings: object
) -> tuple[list[Tensor], str]:
    """Where a rank is after every step of constant gradients, when what it has gone to is changed in some of them."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, codec=codec, **settings)
    path = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(SLOPES[fabric.rank]).backward()
        with torch.no_grad():
            model.first += change(fabric.rank, step)
        try:
            optimizer.step()
        except NonFiniteGradient as error:
            return path, str(error)
        path.append(place_of(model))
    sync.close()
    return path, ""


@pytest.mark.parametrize("value", [torch.nan, -LARGE])
@pytest.mark.parametrize("codec", ["none", "topk:1", "int8", "onebit"])
@pytest.mark.parametrize("mode", ["local:every=2", "diloco:every=2,lr=0.5,momentum=0.5", "slowmo:every=2,momentum=0"])
def test_a_rank_that_went_astray_is_left_out_of_the_mean_and_takes_it(mode: str, codec: str, value: float) -> None:
    """In the first meeting; in the second all ranks count again, and nothing is left of the first."""

    def change(rank: int, step: int) -> float:
        return value if (rank, step) == (1, 1) else 0.0

    ranks = on_ranks(lambda fabric: descend(fabric, mode, codec, change, steps=4), world=3)
    first, second = 2 * RATE * (SLOPES[0] + SLOPES[2]) / 2, 2 * RATE * sum(SLOPES) / 3
    moved = [first, first + second]
    if mode.startswith("diloco"):  # x - lr * (d + momentum * m), with m = momentum * m + d
        moved = [0.75 * first, 0.75 * first + 0.5 * (second + 0.5 * (second + 0.5 * first))]
    tolerance = 1e-4 if codec == "onebit" else 1e-6  # of the place; its scales have 8 bits
    for path, error in ranks:
        assert not error
        assert_close(path[1], torch.full((9,), START - moved[0], dtype=torch.float64), tolerance)
        assert_close(path[3], torch.full((9,), START - moved[1], dtype=torch.float64), tolerance)
    assert alike([path[1] for path, _ in ranks])
    assert alike([path[3] for path, _ in ranks])


@pytest.mark.parametrize("mode", ["local:every=1", "diloco:every=1"])
def test_a_meeting_is_skipped_by_all_when_a_codec_cannot_go_on_from_what_it_has_kept(mode: str) -> None:
    """Rank 1 goes so far twice that what is kept of the first way has no room beside the second."""
    far = 0.6 * torch.finfo(torch.float32).max / (9 * 3 * 16)

    def change(rank: int, step: int) -> float:
        return far if rank == 1 and step < 3 else 0.0

    work = partial(descend, mode=mode, codec="topk:0.1", change=change, steps=5, most_skips=2)
    ranks = on_ranks(work, world=3)
    assert alike([path[0] for path, _ in ranks])
    for rank, (path, error) in enumerate(ranks):
        assert len(path) == 3
        for step in (1, 2):
            assert_close(path[step][3:], path[0][3:] - step * RATE * SLOPES[rank], 1e-6)
        assert "one of first, second is too large on some rank" in error
        assert "3 meetings in a row" in error


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("most_skips", [0, 2])
def test_too_many_meetings_in_a_row_of_which_nothing_comes_are_an_error_on_all_ranks(
    most_skips: int, codec: str
) -> None:
    def change(rank: int, step: int) -> float:
        return torch.nan if step == 2 else 0.0

    work = partial(descend, mode="local:every=1", codec=codec, change=change, steps=9, most_skips=most_skips)
    for path, error in on_ranks(work, world=3):
        assert len(path) == 1 + most_skips
        assert "no rank has parameters that are finite" in error
        assert f"{most_skips + 1} meetings in a row" in error


# Different amounts of data


@pytest.mark.parametrize("mode", ["local:every=3", "slowmo:every=2", "diloco:every=3", "local:every=2,growth=1.5"])
@pytest.mark.parametrize("counts", [(2, 7, 4), (7, 3, 6), (6, 6, 6), (0, 4, 5)])
def test_ranks_may_have_different_amounts_of_data(mode: str, counts: tuple[int, ...]) -> None:
    """And meet in step afterwards."""

    def work(fabric: syncline.Fabric) -> tuple[list[Tensor], list[int]]:
        trainee = Trainee(fabric, mode, check_every=1)
        places = []
        meetings = []
        for _ in range(2):
            with trainee.sync.join():
                trainee.train(counts[fabric.rank])
            places.append(trainee.place())
            meetings.append(trainee.sync.driver.meetings)
        trainee.train(4)
        return [*places, trainee.drained()], [*meetings, trainee.sync.driver.meetings]

    ranks = on_ranks(work, 3)
    assert len({tuple(meetings) for _, meetings in ranks}) == 1
    for places in zip(*[places for places, _ in ranks], strict=True):
        assert alike(list(places))


def test_a_rank_without_data_does_not_count() -> None:
    """Rank 0 makes 2 steps and rank 1 makes 6; they meet after 3: the second time rank 0 has nothing to say."""

    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "local:every=3", PLAIN)
        with trainee.sync.join():
            trainee.train((2, 6)[fabric.rank])
        return trainee.place()

    models = [start(), start()]
    for rank, steps in enumerate((range(2), range(3))):
        train_plainly(models[rank], rank, steps)
    mean = (place_of(models[0]) + place_of(models[1])) / 2
    nn.utils.vector_to_parameters(mean, models[1].parameters())
    train_plainly(models[1], 1, range(3, 6))
    for place in on_ranks(work):
        assert_close(place, place_of(models[1]))


def train_plainly(model: nn.Module, rank: int, steps: range) -> None:
    optimizer = PLAIN(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        torch.autograd.backward(squared(model, Batch(rank, step)))
        optimizer.step()


def test_an_outer_momentum_makes_no_step_of_its_own_when_all_data_end_at_a_meeting() -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, Tensor]:
        trainee = Trainee(fabric, "diloco:every=3")
        with trainee.sync.join():
            met = trainee.train(6)[-1]
        return met, trainee.place()

    for met, joined in on_ranks(work):
        assert same_bits(met, joined)


@pytest.mark.parametrize(
    "mode", ["diloco:every=4,fragments=2", "diloco:every=4,delay=1", "local:warmup=2", "local:within_hosts=true"]
)
def test_join_is_refused_at_its_beginning_where_it_cannot_work(mode: str) -> None:
    def work(fabric: syncline.Fabric) -> None:
        trainee = Trainee(fabric, mode)
        with trainee.sync.join():
            raise AssertionError("nothing may be trained here")

    with pytest.raises(RankFailed, match=r"join.. needs a mode without fragments, delay and within_hosts"):
        on_ranks(work)


# Hosts


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_ranks_of_a_host_are_equal_in_every_step_and_hosts_when_they_meet(warmup: int, codec: str) -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        mode = f"local:every=3,within_hosts=true,warmup={warmup}"
        trainee = Trainee(fabric, mode, ADAM, codec=codec, check_every=1)
        return [*trainee.train(8), trainee.drained()]

    ranks = on_ranks(work, 5, Threads(host_sizes=[2, 3]))
    for step, places in enumerate(zip(*ranks, strict=True), start=1):
        assert alike(list(places[:2]))
        assert alike(list(places[2:]))
        met = step <= warmup or (step - warmup) % 3 == 0 or step == 9
        assert same_bits(places[0], places[2]) == met


def test_a_host_steps_with_the_mean_of_its_ranks() -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        return Trainee(fabric, "local:every=3,within_hosts=true", PLAIN).train(3)

    places = []
    for host in ((0, 1), (2, 3, 4)):
        model = start()
        optimizer = PLAIN(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(sum(squared(model, Batch(rank, step)) for rank in host) / len(host))
            optimizer.step()
        places.append(place_of(model))
    ranks = on_ranks(work, 5, Threads(host_sizes=[2, 3]))
    assert_close(ranks[0][-1], (2 * places[0] + 3 * places[1]) / 5)
