"""Steps with the gradients of the step before: what drains them, what loops may do, and what fails together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.batches import Batch, fill
from support.losses import squared, squared_in_single
from support.models import Boom, Branches, Trapped, Words, mlp, normalized
from support.references import same_bits
from support.runs import SMALL_BUCKETS
from support.trainees import ADAM, DEADLINES, HEAVY, PLAIN, Trainee, delayed_by_hand, gradients_of, place_of, start
from syncline.errors import ConfigError, NonFiniteGradient, PairingError, RankFailed

STEPS = 6
DECAYING = {"optimizer": ADAM}  # weight decay and step counts show a step that should not have been


def on_ranks(work: Callable[[syncline.Fabric], object], world: int = 2) -> list:
    return syncline.run(work, world, "threads", DEADLINES)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def assert_alike(ranks: list[Tensor]) -> None:
    assert all(same_bits(ranks[0], other) for other in ranks[1:])


def assert_the_same_either_way(work: Callable[[syncline.Fabric, bool], Tensor]) -> None:
    """All ranks come to the same bits, with and without what the second argument says."""
    assert_alike([place for does in (True, False) for place in on_ranks(lambda fabric, does=does: work(fabric, does))])


# What drains


def test_the_first_delayed_step_changes_nothing() -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, int, Tensor]:
        trainee = Trainee(fabric, "delayed", **DECAYING)
        return trainee.step(), len(trainee.optimizer.state), trainee.step()

    before = place_of(start())
    for after, kept, later in on_ranks(work):
        assert same_bits(after, before)
        assert not kept
        assert not same_bits(later, before)


@pytest.mark.parametrize("how", ["drain", "evaluate", "close"])
def test_the_last_gradients_are_applied_once(how: str) -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "delayed", **DECAYING, check_every=1)
        trainee.train(STEPS)
        for _ in range(2):
            {"drain": trainee.sync.drain, "evaluate": trainee.evaluated, "close": trainee.sync.close}[how]()
        return trainee.place()

    ranks = on_ranks(work)
    assert_alike(ranks)
    assert_close(ranks[0], delayed_by_hand(2, STEPS, ADAM)[-1])


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_rank_that_evaluates_alone_is_equal_to_the_others_after_the_next_step(inference: Callable) -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        trainee = Trainee(fabric, "delayed", **DECAYING, check_every=1)
        path = trainee.train(3)
        if fabric.rank == 1:
            trainee.model.eval()
            with inference():
                trainee.loss()
            trainee.model.train()
        path.append(trainee.place())
        return [*path, *trainee.train(4), trainee.drained()]

    ranks = on_ranks(work, 3)
    assert not same_bits(ranks[0][3], ranks[1][3])  # it has the last gradients, the others do not
    for step in (0, 1, 2, 4, 5, 6, 7, 8):
        assert_alike([path[step] for path in ranks])


def test_an_evaluation_before_the_step_changes_nothing() -> None:
    """Gradients at hand are not overtaken by later ones."""

    def work(fabric: syncline.Fabric) -> tuple[Tensor, Tensor]:
        trainee = Trainee(fabric, "delayed", **DECAYING)
        trainee.train(3)
        trainee.optimizer.zero_grad()
        trainee.backward()
        before = trainee.place()
        if fabric.rank == 0:
            assert same_bits(trainee.evaluated(), before)
        trainee.update()
        trainee.step()
        return trainee.place(), trainee.drained()

    ranks = on_ranks(work)
    assert_alike([rank[0] for rank in ranks])
    assert_alike([rank[1] for rank in ranks])
    assert_close(ranks[0][0], delayed_by_hand(2, 5, ADAM)[4])


def test_an_evaluation_between_two_backwards_loses_none_of_them() -> None:
    def work(fabric: syncline.Fabric, evaluates: bool) -> Tensor:
        trainee = Trainee(fabric, "delayed", PLAIN, accumulate=2)
        for number in range(4):
            trainee.optimizer.zero_grad()
            trainee.backward()
            if number == 2 and evaluates and fabric.rank == 1:
                own = [parameter.grad.clone() for parameter in trainee.model.parameters()]
                trainee.evaluated()
                assert all(map(same_bits, own, [parameter.grad for parameter in trainee.model.parameters()]))
            torch.autograd.backward(trainee.loss(100 + number))
            trainee.update()
        return trainee.drained()

    evaluated = on_ranks(lambda fabric: work(fabric, True))
    assert_alike(evaluated)
    never = on_ranks(lambda fabric: work(fabric, False))[0]
    torch.testing.assert_close(evaluated[0], never, rtol=0.05, atol=0.05)  # one gradient was not late


# What loops may do


def by_turns(
    fabric: syncline.Fabric, factors: Sequence[float], both: Sequence[int] = (), **settings: object
) -> list[list[Tensor]]:
    """Where each of two optimizers has come to after every step, and after draining; one or both step in each."""
    model = fill(mlp(), seed=0)
    parts = [model[0], model[2:]]
    optimizers = [PLAIN(part.parameters()) for part in parts]
    sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed", **settings)
    path = [[place_of(part) for part in parts]]
    for step, factor in enumerate(factors):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(squared(model, Batch(fabric.rank, step)) * factor)
        for optimizer in optimizers if step in both else [optimizers[step % 2]]:
            optimizer.step()
        path.append([place_of(part) for part in parts])
    sync.drain()
    return [*path, [place_of(part) for part in parts]]


def test_a_pass_that_cannot_be_used_concerns_the_optimizer_that_stepped_after_it() -> None:
    def work(fabric: syncline.Fabric) -> list[list[Tensor]]:
        return by_turns(fabric, [torch.nan if (fabric.rank, step) == (1, 2) else 1.0 for step in range(8)])

    one, other = on_ranks(work)
    for mine, theirs in zip(one, other, strict=True):
        assert all(map(same_bits, mine, theirs))
    moved = [[not same_bits(*places) for places in zip(*pair, strict=True)] for pair in itertools.pairwise(one)]
    first, second = zip(*moved, strict=True)
    assert first == (False, False, True, False, False, False, True, False, True)  # not in step 4
    assert second == (False, False, False, True, False, True, False, True, True)


def test_of_two_optimizers_that_step_together_one_may_be_skipped() -> None:
    """They step with gradients of different passes."""

    def work(fabric: syncline.Fabric) -> list[list[Tensor]]:
        return by_turns(fabric, [torch.nan if step == 2 else 1.0 for step in range(5)], both=(1, 3))

    path = on_ranks(work)[0]
    moved = [[not same_bits(*places) for places in zip(*pair, strict=True)] for pair in itertools.pairwise(path[:-1])]
    first, second = zip(*moved, strict=True)
    assert first == (False, True, True, False, True)
    assert second == (False, False, False, True, False)


def test_a_scale_that_is_too_large_falls_where_optimizers_take_turns() -> None:
    """What overflows is late when the turn of its optimizer comes, and the scaler is still to see it."""

    def work(fabric: syncline.Fabric) -> tuple[float, bool]:
        model = fill(mlp(torch.float32), seed=0)
        optimizers, before = [PLAIN(model[0].parameters()), PLAIN(model[2:].parameters())], place_of(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
        syncline.Sync(model, optimizers, fabric=fabric, mode="delayed", scaler=scaler)
        for step in range(40):
            model.zero_grad()
            scaler.scale(squared_in_single(model, Batch(fabric.rank, step)) * 1e4).backward()
            scaler.step(optimizers[step % 2])
            scaler.update()
        return scaler.get_scale(), not same_bits(place_of(model), before)

    for scale, has_moved in on_ranks(work):
        assert scale < 2.0**127
        assert has_moved


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_optimizers_that_take_turns_lose_no_late_gradient_by_going_on_from_a_checkpoint(at: int, to_none: bool) -> None:
    def work(fabric: syncline.Fabric, resumed: bool) -> Tensor:
        model = fill(mlp(), seed=0)
        optimizers = [PLAIN(part.parameters()) for part in (model[0], model[2:])]
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed")
        for step in range(8):
            if step == at and resumed:
                saved, weights = deepcopy(sync.state_dict()), deepcopy(model.state_dict())
                sync.close()
                model.load_state_dict(weights)
                sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed")
                sync.load_state_dict(saved)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=to_none)
            squared(model, Batch(fabric.rank, step)).backward()
            optimizers[step % 2].step()
        sync.drain()
        return place_of(model)

    assert_the_same_either_way(work)


@pytest.mark.parametrize("to_none", [True, False])
def test_other_optimizers_may_have_gradients_in_hand_when_one_is_reconfigured(to_none: bool) -> None:
    def work(fabric: syncline.Fabric, reconfigures: bool) -> Tensor:
        model = fill(mlp(), seed=0)
        optimizers = [PLAIN(part.parameters()) for part in (model[0], model[2:])]
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed")
        for step in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=to_none)
            squared(model, Batch(fabric.rank, step)).backward()
            optimizers[step % 2].step()
            if step == 4 and reconfigures:
                sync.reconfigure(bucket_bytes=100)
        sync.drain()
        return place_of(model)

    assert_the_same_either_way(work)


@pytest.mark.parametrize("how", ["plainly", "clipped", "after wait()", "by a scaler"])
def test_a_step_without_a_backward_pass_is_refused_however_it_comes(how: str) -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = fill(mlp(), seed=0)
        optimizer = PLAIN(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=how == "by a scaler")
        given = {"scaler": scaler} if scaler.is_enabled() else {}
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="delayed", **given)

        def update() -> None:
            if how == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            if how == "after wait()":
                sync.wait()
            scaler.step(optimizer)
            scaler.update()

        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(squared(model, Batch(fabric.rank, step))).backward()
            update()
        with pytest.raises(ConfigError) as caught:
            update()
        return str(caught.value)

    for said in on_ranks(work):
        assert "a step came without a backward pass since the last one" in said


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = fill(mlp(), seed=0)
        both = [PLAIN(model.parameters()), PLAIN(model[0].parameters())]
        with pytest.raises(PairingError) as caught:
            syncline.Sync(model, both, fabric=fabric, mode="delayed")
        return str(caught.value)

    for said in on_ranks(work):
        assert said.startswith(("0.bias is in optimizers 1 and 2", "0.weight is in optimizers 1 and 2"))


def pair(seed: int = 0) -> tuple[nn.ModuleList, list[torch.optim.Optimizer]]:
    """Two models of one parameter each, with an optimizer each."""
    model = fill(nn.ModuleList(nn.Linear(2, 1, bias=False).double() for _ in range(2)), seed)
    return model, [PLAIN(part.parameters()) for part in model]


class Evaluated(nn.Module):
    """A model of several parts, as one that is called."""

    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self.parts]


def let_come(sync: syncline.Sync, rank: int, how: str) -> None:
    """Let what is under way arrive, on one rank as an evaluation does it, or on all."""
    if how == "all drain" or (how == "one evaluates" and rank == 0):
        sync.drain()


def loss_of(part: nn.Module, fabric: syncline.Fabric, step: int) -> Tensor:
    return part(torch.full((3, 2), 1.0 + fabric.rank + 0.1 * step, dtype=torch.float64)).square().mean()


@pytest.mark.parametrize("pauses", [False, True])
def test_a_second_backward_is_refused_also_of_a_single_parameter_and_while_paused(pauses: bool) -> None:
    def work(fabric: syncline.Fabric) -> str:
        model, optimizers = pair()
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed")
        for step in range(2):
            optimizers[step].zero_grad()
            loss_of(model[step], fabric, step).backward()
            optimizers[step].step()
        with pytest.raises(ConfigError) as caught, sync.no_sync() if pauses else nullcontext():
            loss_of(model[0], fabric, 2).backward()
        return str(caught.value)

    for said in on_ranks(work):
        assert "a second backward pass came before the optimizer's step" in said


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("between", ["nothing", "one evaluates", "all drain"])
def test_each_of_two_optimizers_may_zero_its_own_gradients_in_place(between: str, at: int) -> None:
    def work(fabric: syncline.Fabric, to_none: bool) -> Tensor:
        model, optimizers = pair()
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed")
        for step in range(6):
            turn = step % 2
            if step == at:
                let_come(sync, fabric.rank, between)
            optimizers[turn].zero_grad(set_to_none=to_none)
            loss_of(model[turn], fabric, step).backward()
            optimizers[turn].step()
        sync.drain()
        return place_of(model)

    assert_the_same_either_way(work)


def test_a_gradient_that_is_clipped_together_with_a_nan_is_not_stepped_with() -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        model, optimizers = pair()
        syncline.Sync(model, optimizers, fabric=fabric, mode="delayed")
        for step in range(5):
            model.zero_grad()
            if step == 1:  # of the first optimizer alone, and bad
                (loss_of(model[0], fabric, step) * (torch.nan if fabric.rank else 1.0)).backward()
            else:
                sum(loss_of(part, fabric, step) for part in model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers[: 1 if step == 1 else 2]:
                optimizer.step()
        return place_of(model)

    ranks = on_ranks(work)
    assert_alike(ranks)
    assert ranks[0].isfinite().all()


def test_an_overflow_that_one_rank_evaluates_before_is_seen_by_the_scaler_of_all() -> None:
    def work(fabric: syncline.Fabric, evaluates: bool) -> tuple[float, Tensor]:
        trainee = Trainee(fabric, "delayed", PLAIN, scale=256.0)
        for step in range(5):
            if evaluates and step == 2 and fabric.rank == 0:
                trainee.evaluated()
            trainee.optimizer.zero_grad()
            trainee.backward(torch.inf if (step, fabric.rank) == (1, 1) else 1.0)
            trainee.update()
        return trainee.scaler.get_scale(), trainee.drained()

    ranks = [one for evaluates in (True, False) for one in on_ranks(lambda fabric, does=evaluates: work(fabric, does))]
    assert {scale for scale, _ in ranks} == {128.0}
    assert_alike([place for _, place in ranks])


@pytest.mark.parametrize("who", [[], [0, 1], [0]])
def test_an_overflow_of_one_optimizer_costs_another_one_nothing_whoever_evaluates(who: list[int]) -> None:
    def work(fabric: syncline.Fabric) -> tuple[float, Tensor]:
        model, optimizers = pair()
        top = Evaluated(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        sync = syncline.Sync(top, optimizers, fabric=fabric, mode="delayed", scaler=scaler)
        for step in range(4):
            if step == 1 and fabric.rank in who:
                top.eval()(torch.ones(1, 2, dtype=torch.float64))
                top.train()
            model.zero_grad()
            bad = torch.inf if (step, fabric.rank) == (0, 1) else 1.0
            scaler.scale(loss_of(model[0], fabric, step) + loss_of(model[1], fabric, step) * bad).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        sync.drain()
        return scaler.get_scale(), place_of(model)

    scales, places = zip(*on_ranks(work), strict=True)
    assert set(scales) == {128.0}
    assert_alike([*places])
    assert not same_bits(places[0], place_of(pair()[0]))


@pytest.mark.parametrize("codec", ["none", "topk:1.0"])
def test_an_overflow_that_is_under_way_may_arrive_in_other_buckets(codec: str) -> None:
    def work(fabric: syncline.Fabric, reconfigures: bool) -> Tensor:
        model = fill(nn.ModuleList(nn.Linear(2, 1, bias=False).double() for _ in range(3)), seed=0)
        optimizer = PLAIN(model.parameters())
        sizes = {"bucket_bytes": 16, "first_bucket_bytes": 16}  # a parameter each
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="delayed", codec=codec, **sizes)
        for step in range(4):
            optimizer.zero_grad()
            if step == 2 and reconfigures:
                sync.reconfigure(bucket_bytes=1 << 20)
            bad = torch.inf if (step, fabric.rank) == (1, 1) else 1.0
            first, *others = (loss_of(part, fabric, step) for part in model)
            (first * bad + sum(others)).backward()
            optimizer.step()
        sync.drain()
        return place_of(model)

    assert_the_same_either_way(work)


def test_a_rank_whose_pass_failed_does_not_drain_what_the_others_have_clipped() -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = fill(Trapped(), seed=0)
        optimizer = PLAIN(model.parameters())
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="delayed")
        said = ""
        for step in range(3):
            optimizer.zero_grad()
            with suppress(Boom):
                armed = "between gradients" if (step, fabric.rank) == (2, 0) else ""
                model(Batch(fabric.rank, step).x, armed).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
        try:
            sync.drain()
        except ConfigError as error:
            said = str(error)
        return said

    behind, other = on_ranks(work)
    assert "make a step on all ranks before drain()" in behind
    assert not other


def test_a_rank_that_has_stepped_since_a_pass_does_not_take_the_count_of_the_others_in_it() -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "delayed", PLAIN, codec="topk:0.5")
        for step in range(4):
            if step == 1 and fabric.rank == 0:
                trainee.evaluated()
            if step == 2:
                trainee.sync.drain()
            trainee.optimizer.zero_grad()
            trainee.backward(torch.inf if step == 0 else 1.0)
            trainee.update()
        return trainee.drained()

    assert_alike(on_ranks(work))


def test_a_rank_that_evaluates_before_a_step_that_all_leave_out_has_not_stepped_more_often() -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "delayed", PLAIN)
        for step in range(5):
            if step == 1 and fabric.rank == 0:
                trainee.evaluated()
            if step == 2:
                trainee.sync.drain()
            trainee.optimizer.zero_grad()
            trainee.backward()
            if step != 1:
                trainee.update()
            else:
                trainee.done += 1
        return trainee.drained()

    assert_alike(on_ranks(work))


def test_what_is_frozen_while_its_gradient_is_under_way_is_not_left_behind() -> None:
    def work(fabric: syncline.Fabric) -> tuple[str, Tensor]:
        model, optimizers = pair()
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed")
        sum(loss_of(part, fabric, 0) for part in model).backward()
        for optimizer in optimizers:
            optimizer.step()
        before = place_of(model[1])
        model[1].requires_grad_(False)
        model.zero_grad()
        with pytest.raises(ConfigError) as caught:
            sync.reconfigure(bucket_bytes=100)
        sync.drain()
        sync.reconfigure(bucket_bytes=100)
        return str(caught.value), place_of(model[1]) - before

    for said, gone in on_ranks(work):
        assert said.startswith("1.weight was frozen while a gradient of it was under way")
        assert gone.all()


def test_a_gradient_of_what_is_frozen_in_the_run_that_goes_on_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        model, optimizers = pair()
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed")
        sum(loss_of(part, fabric, 0) for part in model).backward()
        for optimizer in optimizers:
            optimizer.step()
        saved = deepcopy(sync.state_dict())
        sync.close()
        model, optimizers = pair()
        model[1].requires_grad_(False)
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed")
        before = place_of(model[0]), place_of(model[1])
        sync.load_state_dict(saved)
        sync.drain()
        assert same_bits(place_of(model[1]), before[1])
        return place_of(model[0]) - before[0]

    for gone in on_ranks(work):
        assert gone.all()
    assert [one.partition(" is frozen now")[0] for one in caplog.messages] == ["1.weight"] * 2


def test_a_step_that_is_skipped_later_counts_among_those_in_a_row() -> None:
    with pytest.raises(RankFailed, match="that makes 3 steps in a row") as caught:
        on_ranks(lambda fabric: by_turns(fabric, [1.0, 1.0, *[torch.nan] * 6], most_skips=2))
    assert all(isinstance(error, NonFiniteGradient) for error in caught.value.failures.values())


def test_a_loop_that_leaves_out_steps_because_of_what_it_sees_comes_to_an_end_with_it() -> None:
    """Late means stay at hand where a step is left out, but not for ever."""

    def work(fabric: syncline.Fabric, factor: float, scale: float) -> list[Tensor]:
        trainee = Trainee(fabric, "delayed", ADAM, most_skips=3, scale=scale)
        path = [trainee.place()]
        for step in range(12):
            trainee.optimizer.zero_grad()
            trainee.backward(factor if step == 2 else 1.0)
            if torch.stack([p.grad.norm() for p in trainee.model.parameters()]).norm() < 1e6:
                trainee.update()
            else:
                trainee.done += 1
            path.append(trainee.place())
        return path

    for factor, scale, lost in ((torch.nan, 0.0, 2), (torch.nan, 1024.0, 2), (1e9, 0.0, 4)):
        ranks = on_ranks(lambda fabric, by=factor, scale=scale: work(fabric, by, scale))
        for places in zip(*ranks, strict=True):
            assert_alike(list(places))
        moved = [not same_bits(one, other) for one, other in itertools.pairwise(ranks[0])]
        assert moved == [False, True, True, *[False] * lost, *[True] * (9 - lost)]


@pytest.mark.parametrize("steps_on", [True, False])
def test_draining_before_the_step_uses_what_is_at_hand_and_no_more(steps_on: bool) -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, Tensor, Tensor]:
        trainee = Trainee(fabric, "delayed", ADAM)
        trainee.train(3)
        trainee.optimizer.zero_grad()
        trainee.backward()
        drained = trainee.drained()
        if steps_on:
            trainee.update()
        else:
            trainee.done += 1
        after = trainee.place()
        trainee.step()
        return drained, after, trainee.place()

    by_hand = delayed_by_hand(2, 5, ADAM)
    for drained, after, later in on_ranks(work):
        assert_close(drained, by_hand[3])
        assert same_bits(after, drained)
        assert_close(later, by_hand[4] if steps_on else by_hand[3])


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_copied_only_for_a_loop_that_changes_them(to_none: bool) -> None:
    def work(fabric: syncline.Fabric) -> list[bool]:
        trainee = Trainee(fabric, "delayed")
        found = []
        for _ in range(4):
            trainee.optimizer.zero_grad(set_to_none=to_none)
            trainee.backward()
            buckets = trainee.sync.reducer.layout.buckets
            memory = {buffer.values.untyped_storage().data_ptr() for bucket in buckets for buffer in bucket.buffers}
            gradients = [parameter.grad for parameter in trainee.model.parameters()]
            found.append(all(gradient.untyped_storage().data_ptr() in memory for gradient in gradients))
            trainee.update()
        return found

    assert on_ranks(work) == [[False, to_none, to_none, to_none]] * 2  # there are no means in the first step


@pytest.mark.parametrize("to_none", [None, True, False])
def test_a_step_after_closing_uses_the_last_pass_unless_it_was_thrown_away(to_none: bool | None) -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, Tensor]:
        trainee = Trainee(fabric, "delayed", PLAIN)
        for step in range(4):
            trainee.optimizer.zero_grad(set_to_none=to_none is not False)
            trainee.backward()
            if step < 3:
                trainee.update()
        if to_none is not None:
            trainee.optimizer.zero_grad(set_to_none=to_none)
        trainee.sync.close()
        closed = trainee.place()
        trainee.update()
        return closed, trainee.place()

    by_hand = delayed_by_hand(2, 4, PLAIN)
    for closed, after in on_ranks(work):
        assert_close(closed, by_hand[3])
        assert_close(after, by_hand[4] if to_none is None else by_hand[3])


def test_reconfiguring_before_the_first_step_is_refused() -> None:
    """The gradients at hand are zeros, and those in flight are not thrown away."""

    def work(fabric: syncline.Fabric) -> None:
        trainee = Trainee(fabric, "delayed", PLAIN)
        trainee.backward()
        trainee.sync.reconfigure(mode="sync")

    with pytest.raises(RankFailed, match="while there were gradients that no step has used"):
        on_ranks(work)


def test_a_pass_that_was_thrown_away_is_not_waited_for_in_another_mode() -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        trainee = Trainee(fabric, "delayed", PLAIN)
        path = trainee.train(3)
        trainee.optimizer.zero_grad()
        trainee.backward()
        trainee.optimizer.zero_grad()
        trainee.sync.reconfigure(mode="sync")
        return [path[-1], trainee.place(), trainee.step(), trainee.step()]

    ranks = on_ranks(work)
    by_hand = delayed_by_hand(2, 3, PLAIN)
    for path in ranks:
        assert_close(path[0], by_hand[2])
        assert_close(path[1], by_hand[3])
        assert not same_bits(path[2], path[1])
        assert not same_bits(path[3], path[2])


def test_means_that_a_loop_zeroed_in_place_before_any_copy_was_kept_are_lost_and_not_zeros() -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        trainee = Trainee(fabric, "delayed", **DECAYING)
        path = [trainee.place()]
        for step in range(STEPS):
            trainee.optimizer.zero_grad(set_to_none=step != 4)
            trainee.backward()
            if step == 3:
                trainee.done += 1
            else:
                trainee.update()
            path.append(trainee.place())
        return path

    ranks = on_ranks(work)
    moved = [not same_bits(one, other) for one, other in itertools.pairwise(ranks[0])]
    assert moved == [False, True, True, False, False, True]


def test_ranks_on_which_other_optimizers_step_are_told() -> None:
    """Their next passes are alike, and by then each has thrown away what another has used."""

    def work(fabric: syncline.Fabric) -> None:
        model = fill(mlp(), seed=0)
        optimizers = [PLAIN(model[0].parameters()), PLAIN(model[2:].parameters())]
        syncline.Sync(model, optimizers, fabric=fabric, mode="delayed")
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.autograd.backward(squared(model, Batch(fabric.rank, step)))
            optimizers[fabric.rank if step == 1 else 0].step()

    with pytest.raises(RankFailed) as caught:
        on_ranks(work)
    said = "other optimizers stepped after the last backward pass on rank 0 than on rank 1"
    assert [str(error).count(said) for error in caught.value.failures.values()] == [1, 1]


def accumulated(world: int, steps: int) -> Tensor:
    """Delayed steps with two batches each, by hand."""
    model = start()
    optimizer = HEAVY(model.parameters())
    late: list[Tensor] | None = None
    for step in range(steps + 1):
        pairs = zip(*[gradients_of(model, range(world), at) for at in (step, 100 + step)], strict=True)
        new = [one + other for one, other in pairs]
        if late is not None:
            for parameter, gradient in zip(model.parameters(), late, strict=True):
                parameter.grad = gradient
            optimizer.step()
        late = new
    return place_of(model)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("how", ["accumulate", "no_sync"])
def test_several_backwards_are_one_delayed_step(how: str, to_none: bool) -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "delayed", accumulate=2 if how == "accumulate" else 1)
        for number in range(STEPS):
            trainee.optimizer.zero_grad(set_to_none=to_none)
            if how == "accumulate":
                trainee.backward()
            else:
                with trainee.sync.no_sync():
                    trainee.backward()
            torch.autograd.backward(trainee.loss(100 + number))
            trainee.update()
        return trainee.drained()

    ranks = on_ranks(work)
    assert_alike(ranks)
    assert_close(ranks[0], accumulated(2, STEPS))


def test_a_second_backward_before_the_step_is_refused() -> None:
    def work(fabric: syncline.Fabric) -> None:
        trainee = Trainee(fabric, "delayed")
        for _ in range(2):
            trainee.optimizer.zero_grad()
            trainee.backward()
            trainee.backward()
            trainee.update()

    with pytest.raises(
        RankFailed, match=r"second backward pass came before the optimizer's step.*accumulate=N"
    ) as caught:
        on_ranks(work)
    assert isinstance(next(iter(caught.value.failures.values())), ConfigError)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_loop_may_leave_out_a_step(to_none: bool) -> None:
    """As a GradScaler does, and a loop that looks at the norm."""

    def work(fabric: syncline.Fabric) -> list[Tensor]:
        trainee = Trainee(fabric, "delayed", PLAIN)
        path = []
        for number in range(STEPS):
            trainee.optimizer.zero_grad(set_to_none=to_none)
            trainee.backward()
            if number == 3:
                trainee.done += 1
            else:
                trainee.update()
            path.append(trainee.place())
        return path

    ranks = on_ranks(work)
    assert all(same_bits(one, other) for one, other in zip(*ranks, strict=True))
    moved = [not same_bits(one, other) for one, other in zip(ranks[0], ranks[0][1:], strict=False)]
    assert moved == [True, True, False, True, True]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_zeroed_in_place(to_none: bool) -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "delayed")
        for _ in range(STEPS):
            trainee.optimizer.zero_grad(set_to_none=to_none)
            trainee.backward()
            trainee.update()
        return trainee.drained()

    assert_close(on_ranks(work)[1], delayed_by_hand(2, STEPS, HEAVY)[-1])


@pytest.mark.parametrize(("mode", "codec"), [("sync", "dgc:0.3"), ("delayed", "none"), ("delayed", "int8")])
@pytest.mark.parametrize("to_none", [False, True])
def test_a_step_that_a_scaler_leaves_out_is_followed_by_one_of_several_backwards(
    mode: str, codec: str, to_none: bool
) -> None:
    """What the first of these adds to gradients that were zeroed in place is no mean that was left over."""

    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, mode, codec=codec, scale=1024.0, accumulate=2, check_every=1)
        for step in range(5):
            trainee.optimizer.zero_grad(set_to_none=to_none)
            trainee.backward()
            trainee.backward(torch.inf if (fabric.rank, step) == (1, 1) else 1.0)
            trainee.update()
        return trainee.drained()

    ranks = on_ranks(work)
    assert_alike(ranks)
    assert ranks[0].isfinite().all()


def test_clipping_sees_the_means_of_the_step_before() -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        trainee = Trainee(fabric, "delayed", PLAIN)
        norms = []
        for _ in range(4):
            trainee.optimizer.zero_grad()
            trainee.backward()
            norms.append(nn.utils.clip_grad_norm_(trainee.model.parameters(), 1e9).double())
            trainee.update()
        return norms

    model, expected = start(), [torch.zeros((), dtype=torch.float64)]
    for step, place in enumerate([place_of(model), *delayed_by_hand(2, 3, PLAIN)[:2]]):
        nn.utils.vector_to_parameters(place, model.parameters())
        expected.append(torch.cat([gradient.flatten() for gradient in gradients_of(model, range(2), step)]).norm())
    assert_close(torch.stack(on_ranks(work)[0]), torch.stack(expected))


def test_a_rank_that_is_done_and_cannot_clip_is_not_compared_with_those_that_do() -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "delayed", PLAIN, check_every=1)
        with trainee.sync.join():
            for _ in range((2, 5, 3)[fabric.rank]):
                trainee.optimizer.zero_grad()
                trainee.backward()
                nn.utils.clip_grad_norm_(trainee.model.parameters(), 0.1)
                trainee.update()
        trainee.train(2)
        return trainee.drained()

    assert_alike(on_ranks(work, 3))


@pytest.mark.parametrize("to_none", [True, False])
def test_parameters_that_no_rank_or_only_one_uses_get_no_gradient_or_its_share(to_none: bool) -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, list[str]]:
        model = fill(Branches(), seed=0)
        optimizer = ADAM(model.parameters())
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="delayed")
        names = ["always", "here_and_there"] if fabric.rank else ["always"]
        for step in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            torch.autograd.backward(model(Batch(fabric.rank, step).x, names).square().mean())
            optimizer.step()
        absent = sorted({name.split(".")[0] for name, p in model.named_parameters() if p.grad is None})
        sync.drain()
        return place_of(model), absent

    ranks = on_ranks(work)
    assert_alike([rank[0] for rank in ranks])
    assert ranks[0][1] == ranks[1][1] == ["never", "sometimes"]


def test_sparse_gradients_are_refused() -> None:
    def work(fabric: syncline.Fabric) -> None:
        model = fill(Words(), seed=0)
        syncline.Sync(model, PLAIN(model.parameters()), fabric=fabric, mode="delayed")

    with pytest.raises(RankFailed, match=r"has sparse gradients, which mode=delayed cannot delay; use mode=sync"):
        on_ranks(work)


@pytest.mark.parametrize("check_every", [0, 1, 2])
@pytest.mark.parametrize("counts", [(2, 5, 4), (5, 2, 5), (3, 3, 3), (0, 3, 1)])
def test_ranks_may_have_different_amounts_of_data(counts: tuple[int, ...], check_every: int) -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        trainee = Trainee(fabric, "delayed", PLAIN, check_every=check_every)
        with trainee.sync.join():
            trainee.train(counts[fabric.rank])
        joined = trainee.place()
        trainee.done = 100
        return [joined, *trainee.train(3), trainee.drained()]

    for places in zip(*on_ranks(work, 3), strict=True):
        assert_alike(list(places))


@pytest.mark.parametrize("codec", ["none", "topk:0.3"])
@pytest.mark.parametrize("counts", [(2, 5, 4), (5, 2, 5), (0, 3, 1)])
def test_ranks_may_have_different_amounts_of_data_for_several_optimizers(counts: tuple[int, ...], codec: str) -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        model = fill(mlp(), seed=0)
        optimizers = [HEAVY(model[0].parameters()), HEAVY(model[2:].parameters())]
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed", codec=codec)
        path = []

        def train(steps: int) -> None:
            for step in range(steps):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                torch.autograd.backward(squared(model, Batch(fabric.rank, step)))
                optimizers[step % 2].step()

        with sync.join():
            train(counts[fabric.rank])
        path.append(place_of(model))
        train(3)
        path.append(place_of(model))
        sync.drain()
        return [*path, place_of(model)]

    for places in zip(*on_ranks(work, 3), strict=True):
        assert_alike(list(places))


def test_ranks_without_data_count_as_zeros_or_not_at_all() -> None:
    """Rank 0 has one batch, rank 1 two: the second mean is over both ranks, or over the one that has data."""

    def work(fabric: syncline.Fabric, divide_by: str) -> Tensor:
        trainee = Trainee(fabric, "delayed", PLAIN)
        with trainee.sync.join(divide_by):
            trainee.train(1 + fabric.rank)
        return trainee.place()

    for divide_by, share in (("world", 0.5), ("active", 1.0)):
        model = start()
        first, second = gradients_of(model, [0, 1], 0), gradients_of(model, [1], 1)
        with torch.no_grad():
            for parameter, one, other in zip(model.parameters(), first, second, strict=True):
                parameter -= 0.1 * one + 0.1 * share * other
        for place in on_ranks(lambda fabric, by=divide_by: work(fabric, by)):
            assert_close(place, place_of(model))


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_buffers_are_settled_while_gradients_are_under_way(codec: str) -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, list[Tensor]]:
        trainee = Trainee(fabric, "delayed", build=normalized, codec=codec, check_every=1)
        trainee.train(STEPS)
        return trainee.drained(), [buffer.clone() for buffer in trainee.model.buffers()]

    ranks = on_ranks(work, 3)
    assert_alike([place for place, _ in ranks])
    for buffers in zip(*[buffers for _, buffers in ranks], strict=True):
        assert_alike(list(buffers))


# What fails together


@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.3"])
def test_a_pass_with_a_nan_on_one_rank_is_skipped_by_all_and_later_ones_are_not(codec: str) -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        trainee = Trainee(fabric, "delayed", **DECAYING, codec=codec, check_every=1)
        path = [trainee.step(torch.nan if (fabric.rank, step) == (1, 2) else 1.0) for step in range(STEPS)]
        return [*path, trainee.drained()]

    ranks = on_ranks(work)
    for places in zip(*ranks, strict=True):
        assert_alike(list(places))
    moved = [not same_bits(one, other) for one, other in zip(ranks[0], ranks[0][1:], strict=False)]
    assert moved == [True, True, False, True, True, True]  # the step after the one with the NaN
    assert all(place.isfinite().all() for place in ranks[0])


@pytest.mark.parametrize(
    ("where", "goes_on"),
    [
        ("before all gradients", "with the step"),  # it has not begun a pass, so the step has to
        ("between gradients", "with the step"),
        ("between gradients", "with the next batch"),
        ("after all gradients", "with the next batch"),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_rank_that_fails_in_backward_and_goes_on_stays_equal(where: str, at: int, goes_on: str) -> None:
    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "delayed", HEAVY, build=Trapped)
        for step in range(STEPS):
            trainee.optimizer.zero_grad()
            armed = where if (fabric.rank, step) == (1, at) else ""
            batch = Batch(fabric.rank, step)
            loss = (trainee.model(batch.x, armed) - batch.y).square().mean()
            if not armed:
                torch.autograd.backward(loss)
            else:
                with suppress(Boom):
                    torch.autograd.backward(loss)
                del loss
            if not armed or goes_on == "with the step":
                trainee.update()
        return trainee.drained()

    ranks = on_ranks(work)
    assert_alike(ranks)


@pytest.mark.parametrize("where", ["between gradients", "after all gradients"])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_rank_that_fails_in_a_loop_of_several_optimizers_stays_equal(where: str, at: int) -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        model = fill(Trapped(), seed=0)
        optimizers = [HEAVY(model.layers[0].parameters()), HEAVY(model.layers[1:].parameters())]
        sync = syncline.Sync(model, optimizers, fabric=fabric, mode="delayed", **SMALL_BUCKETS)
        path = []
        for step in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            batch = Batch(fabric.rank, step)
            armed = where if (fabric.rank, step) == (1, at) else ""
            loss = (model(batch.x, armed) - batch.y).square().mean()
            with suppress(Boom):
                torch.autograd.backward(loss)
                optimizers[step % 2].step()
            del loss
            path.append(place_of(model))
        sync.drain()
        return [*path, place_of(model)]

    one, other = on_ranks(work)
    equal = list(map(same_bits, one, other))
    assert equal == [not at <= step < at + 2 for step in range(9)]  # it is late by a step of one optimizer


# With a GradScaler


@pytest.mark.parametrize("how", ["drain", "evaluate", "close"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_gradients_follow_a_scale_that_changes_while_they_are_under_way(warmup: int, how: str) -> None:
    def work(fabric: syncline.Fabric) -> tuple[list[Tensor], Tensor]:
        trainee = Trainee(fabric, f"delayed:warmup={warmup}", HEAVY, scale=1024.0)
        path = []
        for step in range(STEPS):
            path.append(trainee.step())
            trainee.scaler.update(1024.0 * 2.0 ** (step % 3))
        {"drain": trainee.sync.drain, "evaluate": trainee.evaluated, "close": trainee.sync.close}[how]()
        return path, trainee.place()

    expected = delayed_by_hand(2, STEPS, HEAVY, warmup=warmup)
    for path, end in on_ranks(work):
        assert_close(torch.stack(path), torch.stack(expected[:-1]))
        assert_close(end, expected[-1])


@pytest.mark.parametrize("to_none", [True, False])
def test_a_scaler_that_leaves_out_a_step_loses_that_pass_alone(to_none: bool) -> None:
    def work(fabric: syncline.Fabric) -> tuple[list[Tensor], float]:
        trainee = Trainee(fabric, "delayed", PLAIN, scale=1024.0)
        path = []
        for step in range(STEPS):
            trainee.optimizer.zero_grad(set_to_none=to_none)
            trainee.backward(torch.inf if (fabric.rank, step) == (1, 2) else 1.0)
            trainee.update()
            path.append(trainee.place())
        return path, trainee.scaler.get_scale()

    ranks = on_ranks(work)
    for places in zip(*[path for path, _ in ranks], strict=True):
        assert_alike(list(places))
    path = ranks[0][0]
    moved = [not same_bits(one, other) for one, other in itertools.pairwise(path)]
    assert moved == [True, True, False, True, True]
    assert [scale for _, scale in ranks] == [512.0, 512.0]
