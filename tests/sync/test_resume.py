"""A run that is interrupted anywhere goes on as if it had not been; with other ranks nothing is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import syncline
from support.catalogue import PROCESS_FABRICS
from support.references import same_bits
from support.trainees import (
    ADAM,
    DEADLINES,
    HEAVY,
    PLAIN,
    Make,
    Trainee,
    checkpoint_of,
    go_on,
    go_on_from_a_checkpoint,
    restore,
    through_a_file,
)
from syncline.errors import ConfigError, RankFailed

STEPS = 11
POINTS = [
    ("delayed", 1),
    ("delayed", 4),  # a gradient is under way
    ("delayed:warmup=3", 2),
    ("delayed:warmup=3", 3),
    ("delayed:warmup=3", 6),
    ("local:every=4", 3),
    ("local:every=4", 4),
    ("local:every=2,growth=1.5", 6),
    ("local:every=3,warmup=5", 3),
    ("local:every=3,warmup=5", 5),
    ("local:every=3,warmup=5", 7),
    ("slowmo:every=4", 5),
    ("diloco:every=4", 6),
    ("diloco:every=4,warmup=3", 2),
    ("diloco:every=8,fragments=2,delay=2,merge=0.5", 3),  # fragment 0 is under way
    ("diloco:every=8,fragments=2,delay=2,merge=0.5", 7),  # fragment 1 is
    ("diloco:every=8,fragments=2,delay=2,merge=0.5", 5),
]


def on_ranks(work: Callable[[syncline.Fabric], object], world: int = 2) -> list:
    return syncline.run(work, world, "threads", DEADLINES)


def assert_same_paths(one: list[list[Tensor]], other: list[list[Tensor]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert len(mine) == len(theirs)
        assert [same_bits(a, b) for a, b in zip(mine, theirs, strict=True)] == [True] * len(mine)


def made(mode: str, codec: str, optimizer: Make = ADAM, **settings: object) -> Callable[[syncline.Fabric], Trainee]:
    return partial(Trainee, mode=mode, codec=codec, optimizer=optimizer, **settings)


@pytest.mark.parametrize("codec", ["none", "topk:0.3", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mode", "at"), POINTS)
def test_a_run_goes_on_bit_for_bit(mode: str, at: int, codec: str) -> None:
    make = made(mode, codec)
    whole = on_ranks(partial(go_on, make=make, at=at, steps=STEPS))
    resumed = on_ranks(partial(go_on_from_a_checkpoint, make=make, at=at, steps=STEPS))
    assert_same_paths(resumed, whole)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
@pytest.mark.parametrize("mode", ["delayed", "diloco:every=8,fragments=2,delay=2,merge=0.5"])
def test_ranks_that_are_processes_go_on_bit_for_bit(mode: str, fabric: str) -> None:
    make = made(mode, "int8")
    whole = syncline.run(partial(go_on, make=make, at=3, steps=STEPS), 2, fabric, DEADLINES)
    resumed = syncline.run(partial(go_on_from_a_checkpoint, make=make, at=3, steps=STEPS), 2, fabric, DEADLINES)
    assert_same_paths(resumed, whole)


@pytest.mark.parametrize("mode", ["delayed", "delayed:warmup=3", "local:every=3", "diloco:every=4,delay=2"])
def test_a_run_with_a_scaler_goes_on_bit_for_bit(mode: str) -> None:
    make = made(mode, "none", HEAVY, scale=4096.0)
    whole = on_ranks(partial(go_on, make=make, at=5, steps=STEPS))
    resumed = on_ranks(partial(go_on_from_a_checkpoint, make=make, at=5, steps=STEPS))
    assert_same_paths(resumed, whole)


class Hesitant(Trainee):
    """Leaves out every fourth step, with a scale that changes in each."""

    def update(self) -> None:
        if self.done % 4 != 3:
            super().update()
        else:
            self.done += 1
        self.scaler.update(1024.0 * 2.0 ** (self.done % 3))


@pytest.mark.parametrize("at", [4, 5, 8])
def test_a_run_that_left_out_a_step_goes_on_bit_for_bit(at: int) -> None:
    """The gradients that the step would have used are still there, in their scale, and no others."""
    make = partial(Hesitant, mode="delayed", optimizer=ADAM, scale=1024.0)
    whole = on_ranks(partial(go_on, make=make, at=at, steps=STEPS))
    resumed = on_ranks(partial(go_on_from_a_checkpoint, make=make, at=at, steps=STEPS))
    assert_same_paths(resumed, whole)


@pytest.mark.parametrize("mode", ["delayed", "diloco:every=8,fragments=2,delay=2,merge=0.5"])
def test_saving_changes_nothing(mode: str) -> None:
    def work(fabric: syncline.Fabric, saves: bool) -> list[Tensor]:
        trainee = Trainee(fabric, mode, ADAM, codec="int8")
        path = []
        for _ in range(STEPS):
            path.append(trainee.step())
            if saves:
                trainee.sync.state_dict()
                trainee.sync.state_dict()
        return [*path, trainee.drained()]

    assert_same_paths(on_ranks(lambda f: work(f, True)), on_ranks(lambda f: work(f, False)))


def test_what_was_saved_does_not_change_with_the_run() -> None:
    def work(fabric: syncline.Fabric) -> bool:
        trainee = Trainee(fabric, "diloco:every=4", ADAM)
        trainee.train(5)
        saved = trainee.sync.state_dict()
        then = through_a_file(saved)
        trainee.train(5)
        moments = [state["optimizers"][0]["state"][0]["exp_avg"] for state in (saved, then)]
        anchors = [state["anchors"]["0.weight"] for state in (saved, then)]
        return same_bits(*moments) and same_bits(*anchors)

    assert on_ranks(work) == [True, True]


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_nan_that_was_under_way_is_skipped_after_a_restart(codec: str) -> None:
    def work(fabric: syncline.Fabric) -> list[Tensor]:
        first = Trainee(fabric, "delayed", ADAM, codec=codec)
        first.train(3)
        first.step(torch.nan if fabric.rank == 1 else 1.0)
        saved = checkpoint_of(first)
        first.sync.close()
        again = Trainee(fabric, "delayed", ADAM, codec=codec)
        restore(again, saved, done=4)
        return [again.place(), *again.train(2), again.drained()]

    ranks = on_ranks(work)
    for places in zip(*ranks, strict=True):
        assert same_bits(*places)
    moved = [not same_bits(one, other) for one, other in zip(ranks[0], ranks[0][1:], strict=False)]
    assert moved == [False, True, True]
    assert ranks[0][-1].isfinite().all()


def test_a_nan_after_a_restart_does_not_spoil_what_was_under_way() -> None:
    """The first pass after a restart is under way itself when the one before it is used."""

    def work(fabric: syncline.Fabric) -> list[Tensor]:
        first = Trainee(fabric, "delayed", ADAM)
        first.train(3)
        saved = checkpoint_of(first)
        first.sync.close()
        again = Trainee(fabric, "delayed", ADAM)
        restore(again, saved, done=3)
        return [again.place(), again.step(torch.nan if fabric.rank == 1 else 1.0), again.step(), again.drained()]

    ranks = on_ranks(work)
    for places in zip(*ranks, strict=True):
        assert same_bits(*places)
    moved = [not same_bits(one, other) for one, other in zip(ranks[0], ranks[0][1:], strict=False)]
    assert moved == [True, False, True]


def test_a_scale_that_changes_after_a_restart_is_followed() -> None:
    def work(fabric: syncline.Fabric, is_interrupted: bool) -> Tensor:
        trainee = Trainee(fabric, "delayed", PLAIN, scale=1024.0)
        trainee.train(3)
        if is_interrupted:
            saved = checkpoint_of(trainee)
            trainee.sync.close()
            trainee = Trainee(fabric, "delayed", PLAIN, scale=1024.0)
            restore(trainee, saved, done=3)
        trainee.scaler.scale(torch.zeros(()))  # a new scaler has no scale before
        trainee.scaler.update(256.0)
        trainee.train(2)
        return trainee.drained()

    one, other = (on_ranks(lambda fabric, is_so=is_so: work(fabric, is_so)) for is_so in (True, False))
    assert same_bits(one[0], other[0])
    assert same_bits(one[0], one[1])


# Another number of ranks


def saved_by(world: int, mode: str, codec: str, steps: int) -> list[dict]:
    def work(fabric: syncline.Fabric) -> dict:
        trainee = Trainee(fabric, mode, HEAVY, codec=codec)
        trainee.train(steps)
        return checkpoint_of(trainee)

    return on_ranks(work, world)


@pytest.mark.parametrize("codec", ["none", "topk:0.3"])
@pytest.mark.parametrize(
    "mode", ["local:every=3", "slowmo:every=3", "diloco:every=3", "diloco:every=6,fragments=2,delay=2"]
)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_other_ranks_go_on_from_means(mode: str, codec: str, world: int) -> None:
    saved = saved_by(3, mode, codec, 5)
    states = [one["sync"] for one in saved]

    def work(fabric: syncline.Fabric) -> tuple[dict, Tensor]:
        trainee = Trainee(fabric, mode, HEAVY, codec=codec)
        trainee.sync.load_state_dict(states)
        loaded = through_a_file(trainee.sync.state_dict())
        trainee.train(4)
        return loaded, trainee.drained()

    for loaded, end in (ranks := on_ranks(work, world)):
        for name, parameter in loaded["parameters"].items():
            mean = torch.stack([state["parameters"][name] for state in states]).mean(0)
            torch.testing.assert_close(parameter, mean, rtol=1e-12, atol=1e-12)
        for kind in ("anchors", "momenta"):
            assert set(loaded[kind]) == set(states[0][kind])
            assert all(same_bits(loaded[kind][name], states[0][kind][name]) for name in loaded[kind])
        momentum = loaded["optimizers"][0]["state"][0]["momentum_buffer"]
        assert same_bits(momentum, states[0]["optimizers"][0]["state"][0]["momentum_buffer"])
        assert same_bits(end, ranks[0][1])
        if codec != "none":
            assert_mean_is_kept(loaded, states)


def assert_mean_is_kept(loaded: dict, states: list[dict]) -> None:
    kept = [state["codec_state"]["residual"] for state in states]
    assert loaded["codec_state"]["residual"]
    for name, tensor in loaded["codec_state"]["residual"].items():
        torch.testing.assert_close(tensor, torch.stack([one[name] for one in kept]).mean(0))
        assert not same_bits(kept[0][name], kept[1][name])


def test_other_ranks_go_on_in_the_warm_up_with_the_mean_of_what_codecs_kept() -> None:
    mode, codec = "local:every=3,warmup=8", "topk:0.3"
    states = [one["sync"] for one in saved_by(3, mode, codec, 4)]

    def work(fabric: syncline.Fabric) -> tuple[dict, Tensor]:
        trainee = Trainee(fabric, mode, HEAVY, codec=codec)
        trainee.sync.load_state_dict(states)
        trainee.done = 4
        loaded = through_a_file(trainee.sync.state_dict())
        return loaded, trainee.step()

    ranks = on_ranks(work)
    for loaded, place in ranks:
        assert_mean_is_kept(loaded["gradients"], [state["gradients"] for state in states])
        assert same_bits(place, ranks[0][1])


@pytest.mark.parametrize("codec", ["none", "topk:0.3"])
def test_other_ranks_apply_the_gradient_that_was_under_way(codec: str) -> None:
    saved = saved_by(3, "delayed", codec, 4)

    def work(fabric: syncline.Fabric) -> tuple[Tensor, Tensor]:
        trainee = Trainee(fabric, "delayed", HEAVY, codec=codec)
        trainee.model.load_state_dict(saved[0]["model"])
        trainee.optimizer.load_state_dict(copy.deepcopy(saved[0]["optimizer"]))
        trainee.sync.load_state_dict([one["sync"] for one in saved])
        return trainee.drained(), trainee.step()

    def whole(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, "delayed", HEAVY, codec=codec)
        trainee.train(4)
        return trainee.drained()

    ranks = on_ranks(work)
    assert same_bits(ranks[0][0], on_ranks(whole, 3)[0])
    for places in zip(*ranks, strict=True):
        assert same_bits(*places)


@pytest.mark.parametrize("mode", ["delayed", "local:every=3"])
def test_a_state_for_servers_or_of_too_few_ranks_is_refused(mode: str) -> None:
    saved = saved_by(3, mode, "none", 2)[1]["sync"]

    def work(fabric: syncline.Fabric, mode: str, saved: dict) -> None:
        Trainee(fabric, mode).sync.load_state_dict(saved)

    for given, state, message in (("async", saved | {"rank": 0, "world": 2}, "servers"), (mode, saved, "all 3 ranks")):
        with pytest.raises(RankFailed, match=message) as caught:
            on_ranks(partial(work, mode=given, saved=state))
        assert isinstance(next(iter(caught.value.failures.values())), ConfigError)
