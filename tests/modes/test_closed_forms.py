"""The closed forms that modes obey, and what they come to by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import syncline
from support.quadratics import Descent, local_fixed_point
from support.trainees import (
    ADAM,
    DEADLINES,
    HEAVY,
    PLAIN,
    Alone,
    Make,
    Streamed,
    Trainee,
    assert_paths,
    delayed_by_hand,
)

BLOCKS = {0: ["0.weight", "0.bias"], 2: ["2.weight", "2.bias"], 4: ["4.weight", "4.bias"]}  # of models.mlp


def paths_of(world: int, mode: str, steps: int, optimizer: Make = PLAIN, **settings: object) -> list[list[Tensor]]:
    """Where every rank is after every step, and after draining."""

    def work(fabric: syncline.Fabric) -> list[Tensor]:
        trainee = Trainee(fabric, mode, optimizer, **settings)
        return [*trainee.train(steps), trainee.drained()]

    return syncline.run(work, world, "threads", DEADLINES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "largest"), [("delayed", 1.0), ("sync", 2.0)])
def test_the_largest_stable_learning_rate_is_the_one_of_its_delay(mode: str, largest: float) -> None:
    """x' = x - rate * x of t steps ago is stable up to 2 sin(pi / (2 (2 t + 1)))."""

    def end(factor: float) -> float:
        descent = Descent(mode, factor * largest, steps=800, alike=True)
        return float(syncline.run(descent, 2, "threads")[0][-1].abs().max())

    assert end(0.98) < 5.0e-3
    assert end(1.02) > 5.0e3


@pytest.mark.parametrize("every", [1, 2, 5, 10])
def test_local_sgd_ends_at_its_fixed_point(every: int) -> None:
    world, lr = 2, 0.1
    for path in syncline.run(Descent(f"local:every={every}", lr, steps=400), world, "threads"):
        assert path[-1].tolist() == pytest.approx([local_fixed_point(world, lr, every)] * 2, abs=1e-6)
        assert abs(path[-1][0].item() - local_fixed_point(world, lr, every + 1)) > 1e-3


def descents(world: int = 3, **one_and_other: Descent) -> list[list[Tensor]]:
    """The paths of all ranks in two descents."""
    return [syncline.run(descent, world, "threads") for descent in one_and_other.values()]


def test_diloco_that_meets_in_every_step_is_nesterov_sgd() -> None:
    outer, inner = descents(
        one=Descent("diloco:every=1,lr=0.7,momentum=0.9", lr=0.1, steps=60),
        other=Descent("sync", lr=0.07, steps=60, momentum=0.9, nesterov=True),
    )
    torch.testing.assert_close(outer[0], inner[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["slowmo:every=4,lr=1,momentum=0", "diloco:every=4,lr=1,momentum=0"])
def test_an_outer_optimizer_that_only_follows_is_local_sgd(mode: str) -> None:
    followed, averaged = descents(one=Descent(mode, lr=0.1, steps=30), other=Descent("local:every=4", lr=0.1, steps=30))
    for one, other in zip(followed, averaged, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert not torch.equal(averaged[0][-1], averaged[1][-1])  # 30 is between two meetings


def test_slow_momentum_has_its_closed_form_when_the_learning_rate_changes() -> None:
    """u = 0.5 u + (anchor - mean) / rate; anchor -= 0.9 rate u. The rate is halved in the middle."""
    world, every = 2, 3
    rates = [0.1] * 6 + [0.05] * 6

    def work(fabric: syncline.Fabric) -> Tensor:
        trainee = Trainee(fabric, f"slowmo:every={every},momentum=0.5,lr=0.9", PLAIN)
        for rate in rates:
            trainee.optimizer.param_groups[0]["lr"] = rate
            trainee.step()
        return trainee.place()

    ranks = Alone(world, PLAIN)
    names = [name for name, _ in ranks.models[0].named_parameters()]
    anchors = {name: ranks.copies(name)[0].clone() for name in names}
    slow = {name: torch.zeros_like(anchor) for name, anchor in anchors.items()}
    for first in range(0, len(rates), every):
        for optimizer in ranks.optimizers:
            optimizer.param_groups[0]["lr"] = rates[first]
        ranks.train(every)
        for name in names:
            slow[name] = 0.5 * slow[name] + (anchors[name] - ranks.mean(name)) / rates[first]
            anchors[name] = anchors[name] - 0.9 * rates[first] * slow[name]
            for copied in ranks.copies(name):
                copied.copy_(anchors[name])
    assert_paths(syncline.run(work, world, "threads"), ranks.places())


@pytest.mark.parametrize("world", [2, 3])
def test_local_sgd_that_meets_in_every_step_is_synchronous_sgd(world: int) -> None:
    local, synchronous = (paths_of(world, mode, 8) for mode in ("local:every=1", "sync"))
    assert_paths(local[0], synchronous[0])


@pytest.mark.parametrize("optimizer", [PLAIN, HEAVY, ADAM], ids=["SGD", "momentum", "AdamW"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_delayed_steps_are_those_worked_out_by_hand(world: int, optimizer: Make) -> None:
    for path in paths_of(world, "delayed", 9, optimizer):
        assert_paths(path, delayed_by_hand(world, 9, optimizer))
    with pytest.raises(AssertionError):
        assert_paths(path, delayed_by_hand(world, 9, optimizer, lag=2))


def test_delayed_steps_begin_after_the_warm_up() -> None:
    path = paths_of(2, "delayed:warmup=3", 9, HEAVY)[1]
    assert_paths(path, delayed_by_hand(2, 9, HEAVY, warmup=3))


@pytest.mark.parametrize("world", [2, 4])
def test_local_sgd_with_any_optimizer_is_what_it_is_by_hand(world: int) -> None:
    every = 3
    ranks = Alone(world, ADAM)
    expected = []
    for step in range(1, 9):
        ranks.train()
        if step % every == 0:
            ranks.average()
        expected.append(ranks.places())
    actual = paths_of(world, f"local:every={every}", 8, ADAM)
    for rank in range(world):
        assert_paths(actual[rank][:-1], [places[rank] for places in expected])


STREAMS = {
    "whole": ("every=3", Streamed(3, [BLOCKS[0] + BLOCKS[2] + BLOCKS[4]], 0, 0.0, 0.7, 0.9)),
    "delayed": ("every=4,delay=2", Streamed(4, [BLOCKS[0] + BLOCKS[2] + BLOCKS[4]], 2, 0.0, 0.7, 0.9)),
    "merged": ("every=4,delay=3,merge=0.5", Streamed(4, [BLOCKS[0] + BLOCKS[2] + BLOCKS[4]], 3, 0.5, 0.7, 0.9)),
    "two": ("every=4,fragments=2", Streamed(4, [BLOCKS[0] + BLOCKS[4], BLOCKS[2]], 0, 0.0, 0.7, 0.9)),
    "three": (
        "every=9,fragments=3,delay=2,merge=0.25,lr=0.5,momentum=0.8",
        Streamed(9, [BLOCKS[0], BLOCKS[2], BLOCKS[4]], 2, 0.25, 0.5, 0.8),
    ),
    "kept whole": (
        "every=4,fragments=2,delay=1,merge=1",
        Streamed(4, [BLOCKS[0] + BLOCKS[4], BLOCKS[2]], 1, 1.0, 0.7, 0.9),
    ),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("world", [2, 3])
def test_diloco_in_fragments_is_what_it_is_by_hand(stream: str, world: int) -> None:
    steps = 22
    settings, by_hand = STREAMS[stream]
    expected = by_hand.run(world, steps, ADAM)
    for rank, path in enumerate(paths_of(world, f"diloco:{settings}", steps, ADAM)):
        assert_paths(path[:-1], [places[rank] for places in expected], 1e-10)
