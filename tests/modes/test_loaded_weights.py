"""Weights that are loaded after `Sync` in modes in which ranks train alone: they are where ranks go on from."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import syncline
from support import diverging
from support.batches import fill
from support.catalogue import one_now_others_slow
from support.diverging import AT, Happens, Outcome, train_while
from support.models import mlp
from support.references import same_bits
from support.trainees import DEADLINES, HEAVY, PLAIN, SMALL_BUCKETS, Trainee, checkpoint_of, place_of, restore
from syncline.guards.fingerprint import LOOKED_AT

WORLD = 3
MODES = {
    "local": ("local:every=3", {}),
    "local with a codec": ("local:every=3", {"codec": "int8"}),
    "local after a warm-up": ("local:every=3,warmup=2", {}),
    "slowmo": ("slowmo:every=3", {}),
    "diloco": ("diloco:every=3", {}),
    "diloco with a codec": ("diloco:every=3", {"codec": "topk:0.5"}),
    "streaming": ("diloco:every=4,fragments=2,delay=1,merge=0.5", {}),
    "with a scaler": ("diloco:every=3", {"scale": 1024.0}),
}


def run(happens: Happens, name: str, fabric: str = "threads", **settings: Any) -> list[Outcome]:
    mode, own = MODES[name]
    return syncline.run(
        partial(train_while, happens=happens, mode=mode, **({"optimizer": HEAVY} | own | settings)),
        WORLD,
        fabric,
        DEADLINES,
    )


# All ranks load the same


def weights(seed: int) -> dict[str, Tensor]:
    return fill(mlp(), seed=seed).state_dict()


def from_loaded_weights(fabric: syncline.Fabric, name: str, after: bool) -> list[Tensor]:
    """Every place of a run whose weights were loaded before or after its Sync was made."""
    mode, settings = MODES[name]
    trainee = Trainee(fabric, mode, HEAVY, **settings)
    trainee.model.load_state_dict(weights(7))
    if not after:
        trainee.sync.close()
        own = SMALL_BUCKETS | {key: value for key, value in settings.items() if key != "scale"}
        trainee.sync = syncline.Sync(
            trainee.model, trainee.optimizer, fabric=fabric, mode=mode, scaler=trainee.scaler, **own
        )
    path = [*trainee.train(10), trainee.drained()]
    trainee.sync.close()
    return path


@pytest.mark.parametrize("name", MODES)
def test_weights_loaded_after_sync_are_as_good_as_those_loaded_before(name: str) -> None:
    after = syncline.run(partial(from_loaded_weights, name=name, after=True), WORLD, "threads", DEADLINES)
    before = syncline.run(partial(from_loaded_weights, name=name, after=False), WORLD, "threads", DEADLINES)
    for mine, expected in zip(after, before, strict=True):
        assert all(map(same_bits, mine, expected))


def load_and_stand_still(fabric: syncline.Fabric, mode: str, at: int, part: int | None = None) -> tuple[Tensor, Tensor]:
    """Train, load, and train on at a rate of 0: where a rank should be, and where it is after some periods."""
    trainee = Trainee(fabric, mode, PLAIN)
    trainee.train(at)
    module = trainee.model if part is None else trainee.model[part]
    saved = {name: torch.full_like(one, 0.5) for name, one in module.state_dict().items()}
    module.load_state_dict(saved)
    trainee.optimizer.param_groups[0]["lr"] = 0.0
    expected = place_of(module)
    trainee.train(9)
    trainee.sync.drain()
    found = place_of(module)
    trainee.sync.close()
    return expected, found


@pytest.mark.parametrize("part", [None, 2])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(
    "mode",
    [
        "local:every=3",
        "slowmo:every=3,momentum=0.0",
        "diloco:every=3,momentum=0.0",
        "diloco:every=3,momentum=0.0,warmup=2",
        "diloco:every=4,momentum=0.0,fragments=2,delay=1",
        "diloco:every=4,momentum=0.0,fragments=2,delay=1,merge=0.5",
    ],
)
def test_loaded_weights_are_no_training_progress(mode: str, at: int, part: int | None) -> None:
    """Also those that are loaded while a fragment is under way."""
    work = partial(load_and_stand_still, mode=mode, at=at, part=part)
    for expected, found in syncline.run(work, 2, "threads", DEADLINES):
        assert same_bits(found, expected)


# Some ranks load


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("happens", [diverging.weights_are_loaded, diverging.one_layer_is_loaded])
def test_weights_that_one_rank_loads_are_refused_at_the_next_synchronization(happens: Happens, name: str) -> None:
    first = "2.weight" if happens is diverging.one_layer_is_loaded else "0.weight"
    for rank in run(happens, name):
        assert rank.error == "ReplicasDiverged", rank.message
        assert f"{first} was loaded by rank 1, and not by ranks 0, 2; it is the first of" in rank.message
        assert AT < rank.steps + 1 <= AT + 5


@pytest.mark.parametrize("fabric", one_now_others_slow(["shm", "torch"]))
def test_weights_that_one_rank_loads_are_refused_on_every_fabric(fabric: str) -> None:
    for rank in run(diverging.weights_are_loaded, "diloco", fabric):
        assert "0.weight was loaded by rank 1, and not by ranks 0, 2" in rank.message


@pytest.mark.parametrize("name", MODES)
def test_different_weights_are_refused(name: str) -> None:
    for rank in run(diverging.all_load_others, name):
        assert rank.error == "ReplicasDiverged", rank.message
        assert "0.weight was loaded by rank 0, with other values by rank 1, with other values by rank 2" in rank.message


@pytest.mark.parametrize("mode", ["diloco:every=3,warmup=20", "local:every=30,within_hosts=true"])
def test_where_gradients_are_averaged_in_every_step_weights_are_compared_in_every_step(mode: str) -> None:
    work = partial(train_while, happens=diverging.weights_are_loaded, mode=mode)
    for rank in syncline.run(work, WORLD, "threads", DEADLINES):
        assert f"replicas differ before step {AT + 1}: 0.weight" in rank.message
        assert rank.steps == AT


def test_nobody_is_refused_without_the_guard() -> None:
    for rank in run(diverging.weights_are_loaded, "diloco", divergence_guard=False):
        assert not rank.error, rank.message


# Hyperparameters


@pytest.mark.parametrize("name", MODES)
def test_hyperparameters_that_differ_are_refused_at_the_next_synchronization(name: str) -> None:
    for rank in run(diverging.rate_is_lowered, name):
        assert rank.error == "ReplicasDiverged", rank.message
        assert "lr in group 0 of optimizer 0 (SGD) is 0.05 on ranks 0, 2, and 0.025 on rank 1" in rank.message


# What is silent


@pytest.mark.parametrize("name", [*MODES, "within hosts"])
@pytest.mark.parametrize("happens", [diverging.nothing, diverging.all_clamp, diverging.all_lower_the_rate])
def test_training_and_what_belongs_to_it_stays_as_it_was(happens: Happens, name: str) -> None:
    mode, settings = MODES.get(name, ("local:every=3,within_hosts=true", {}))

    def work(fabric: syncline.Fabric, guarded: bool) -> Outcome:
        return train_while(fabric, happens, mode, optimizer=HEAVY, divergence_guard=guarded, **settings)

    watched = syncline.run(partial(work, guarded=True), WORLD, "threads", DEADLINES)
    plain = syncline.run(partial(work, guarded=False), WORLD, "threads", DEADLINES)
    assert [rank.error for rank in watched] == [""] * WORLD, watched[0].message
    assert all(rank.comparisons <= LOOKED_AT * (happens is diverging.all_clamp) for rank in watched)
    assert all(same_bits(mine.place, theirs.place) for mine, theirs in zip(watched, plain, strict=True))


def test_between_synchronizations_ranks_may_change_their_weights() -> None:
    for rank in run(diverging.a_weight_is_edited, "diloco"):
        assert not rank.error, rank.message


@pytest.mark.parametrize("order", ["model first", "sync first"])
@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("name", MODES)
def test_a_run_goes_on_in_whatever_order_its_parts_are_loaded(name: str, at: int, order: str) -> None:
    mode, settings = MODES[name]

    def work(fabric: syncline.Fabric) -> tuple[list[Tensor], list[Tensor]]:
        first = Trainee(fabric, mode, HEAVY, **settings)
        first.train(at)
        saved = checkpoint_of(first)
        expected = [*first.train(6), first.drained()]
        first.sync.close()
        again = Trainee(fabric, mode, HEAVY, **settings)
        restore(again, copy.deepcopy(saved), at)
        if order == "sync first":
            again.model.load_state_dict(saved["model"])
        found = [*again.train(6), again.drained()]
        again.sync.close()
        return expected, found

    for expected, found in syncline.run(work, WORLD, "threads", DEADLINES):
        assert all(map(same_bits, found, expected))


def test_a_copy_of_the_model_is_on_its_own() -> None:
    def work(fabric: syncline.Fabric) -> str:
        trainee = Trainee(fabric, "diloco:every=3", partial(SGD, lr=0.1))
        copies = [copy.deepcopy(trainee.model), pickle.loads(pickle.dumps(trainee.model))]
        trainee.train(2)
        for one in copies:
            one.load_state_dict(weights(fabric.rank))
        trainee.train(4)
        trainee.sync.close()
        return "trained"

    assert syncline.run(work, 2, "threads", DEADLINES) == ["trained"] * 2
