"""The divergence guard, which is on unless it is switched off: what makes replicas differ is found before a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import syncline
from support import diverging
from support.catalogue import PROCESS_FABRICS
from support.diverging import AT, OPTIMIZERS, Happens, Outcome, start_with_other_optimizers, train_while
from support.references import same_bits
from support.trainees import DEADLINES, HEAVY
from syncline.core.status import OwnStatus, PassStatus, read_status, write_status
from syncline.guards.fingerprint import LOOKED_AT, MOST_KINDS

WORLD = 3

MISTAKES: dict[str, tuple[Happens, str]] = {  # on rank 1 alone, and what is named
    "weights loaded": (diverging.weights_are_loaded, "0.weight is the first of "),
    "a layer loaded": (diverging.one_layer_is_loaded, "2.weight is the first of 2 tensors"),
    "optimizer state loaded": (diverging.optimizer_state_is_loaded, "optimizer state exp_avg of 0.weight"),
    "optimizer state edited": (diverging.optimizer_state_is_edited, "optimizer state exp_avg of 2.bias"),
    "optimizer state cleared": (
        diverging.optimizer_state_is_cleared,
        "optimizer state exp_avg of 0.weight, which some",
    ),
    "a weight edited": (diverging.a_weight_is_edited, "2.bias is the first of 1 tensors"),
    "data edited": (diverging.data_is_edited, "2.bias is the first of 1 tensors"),
    "rate lowered": (
        diverging.rate_is_lowered,
        "lr in group 0 of optimizer 0 (AdamW) is 0.01 on ranks 0, 2, and 0.005",
    ),
    "betas changed": (diverging.betas_are_changed, "betas in group 0 of optimizer 0 (AdamW) is (0.9, 0.999) on ranks"),
}
WAYS: dict[str, dict[str, Any]] = {
    "sync": {},
    "codec": {"codec": "topk:0.5"},
    "halves": {"codec": "fp16"},
    "scaler": {"scale": 1024.0},
    "bfloat16": {"build": diverging.narrow},
}


def train(happens: Happens, fabric: str = "threads", world: int = WORLD, **settings: Any) -> list[Outcome]:
    return syncline.run(partial(train_while, happens=happens, **settings), world, fabric, DEADLINES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_one_rank_is_found_before_the_step(mistake: str, way: str) -> None:
    happens, named = MISTAKES[mistake]
    for rank in train(happens, **WAYS[way]):
        assert rank.error == "ReplicasDiverged", rank.message
        assert f"differ before step {AT + 1}: {named}" in rank.message
        assert "on rank 1" in rank.message
        assert rank.steps == AT


@pytest.mark.parametrize("mistake", ["weights loaded", "a layer loaded", "optimizer state loaded", "a weight edited"])
def test_of_two_ranks_the_one_that_changed_something_is_named(mistake: str) -> None:
    happens, named = MISTAKES[mistake]
    for rank in train(happens, world=2):
        assert f"differ before step {AT + 1}: {named}" in rank.message
        assert "since the last step rank 1 loaded a state, or changed parameters" in rank.message


@pytest.mark.parametrize("mistake", MISTAKES)
def test_with_delayed_gradients_a_mistake_is_found_a_step_later(mistake: str) -> None:
    happens, _ = MISTAKES[mistake]
    for rank in train(happens, mode="delayed"):
        assert rank.error == "ReplicasDiverged", rank.message
        assert "on rank 1" in rank.message
        assert AT + 1 <= rank.steps + ("hyper" in rank.message) <= AT + 2


@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
@pytest.mark.parametrize("mistake", ["weights loaded", "rate lowered"])
def test_a_mistake_is_found_on_every_fabric(mistake: str, fabric: str) -> None:
    happens, named = MISTAKES[mistake]
    for rank in train(happens, fabric):
        assert f"differ before step {AT + 1}: {named}" in rank.message
        assert rank.steps == AT


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_an_optimizer_state_that_one_rank_has_and_others_have_not_is_found(mode: str) -> None:
    for rank in train(diverging.optimizer_is_fresh_on_others, mode=mode):
        assert rank.error == "ReplicasDiverged", rank.message
        assert "optimizer state exp_avg of 0.weight, which some do not have" in rank.message or mode == "delayed"


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_an_optimizer_state_that_one_rank_had_before_sync_is_found(mode: str) -> None:
    work = partial(diverging.start_with_used_optimizers, mode=mode)
    for told in syncline.run(work, WORLD, "threads", DEADLINES):
        assert told.startswith("ReplicasDiverged: replicas differ ")
        assert "on rank 1" in told


def test_whole_numbers_in_an_optimizer_state_are_compared() -> None:
    for rank in train(diverging.counted_alone):
        assert "optimizer state count of 2.weight is the first of 1 tensors" in rank.message


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_a_scaler_that_only_one_rank_has_is_refused(mode: str) -> None:
    for told in syncline.run(partial(diverging.start_with_one_scaler, mode=mode), WORLD, "threads", DEADLINES):
        assert told.startswith("LayoutMismatch")
        assert "+GradScaler: yes" in told


@pytest.mark.parametrize("make", [diverging.Plateau, diverging.ScheduleIsLoaded])
def test_schedules_that_come_apart_are_found_before_the_step_that_they_change(make: type) -> None:
    for rank in train(make()):
        assert rank.error == "ReplicasDiverged", rank.message
        assert "lr in group 0 of optimizer 0 (AdamW) is " in rank.message
        assert " on rank 1" in rank.message
    path = train(make(), divergence_guard=False)
    assert not same_bits(path[0].place, path[1].place)


def test_weights_that_all_ranks_load_must_be_the_same() -> None:
    for rank in train(diverging.all_load_others):
        assert rank.error == "ReplicasDiverged", rank.message
        assert rank.steps == AT


HARMLESS: dict[str, tuple[Happens, int]] = {  # and how many comparisons of everything it may cost
    "nothing": (diverging.nothing, 0),
    "all load the same": (diverging.all_load_the_same, 1),
    "all clamp": (diverging.all_clamp, LOOKED_AT + 1),
    "all load every step": (diverging.all_load_every_step, LOOKED_AT + 1),
    "one swaps and back": (diverging.one_swaps_its_weights_and_back, LOOKED_AT + 1),
    "all lower the rate": (diverging.all_lower_the_rate, 0),
}


@pytest.mark.parametrize("way", [*WAYS, "delayed"])
@pytest.mark.parametrize("harmless", HARMLESS)
def test_what_leaves_replicas_equal_is_silent_and_compared_a_few_times_at_most(harmless: str, way: str) -> None:
    happens, comparisons = HARMLESS[harmless]
    settings = WAYS.get(way, {"mode": "delayed"})
    ranks = train(happens, steps=12, **settings)
    for rank in ranks:
        assert not rank.error, rank.message
        assert rank.steps == 12
        assert rank.comparisons <= comparisons
        assert same_bits(rank.place, ranks[0].place)
    expected = train(happens, steps=12, divergence_guard=False, **settings)
    assert same_bits(ranks[0].place, expected[0].place)


def changes_more_each_time(trainee: Any, step: int) -> None:
    with torch.no_grad():
        for _ in range(step):
            trainee.model[0].bias.mul_(1.0)


def test_a_loop_that_changes_its_weights_in_ever_other_ways_is_not_compared_for_ever() -> None:
    for rank in train(changes_more_each_time, steps=40):
        assert not rank.error, rank.message
        assert rank.comparisons <= MOST_KINDS * LOOKED_AT


DIFFERENCES = {
    "lr": "+lr in group 0 of optimizer 0 (SGD): 0.2",
    "weight_decay": "+weight_decay in group 0 of optimizer 0 (SGD): 0.1",
    "class": "+optimizer 0 is Adam",
    "groups": "+optimizer 0 group 1 parameter 2.weight",
    "tensor": "+lr in group 0 of optimizer 0 (Adam): 1.1",
}


@pytest.mark.parametrize("mode", ["sync", "delayed", "local", "diloco", "async"])
@pytest.mark.parametrize("what", OPTIMIZERS)
def test_other_optimizers_are_refused_at_the_start(what: str, mode: str) -> None:
    for told in syncline.run(partial(start_with_other_optimizers, what=what, mode=mode), WORLD, "threads", DEADLINES):
        assert told.startswith("LayoutMismatch: ranks [1] differ from rank 0")
        assert DIFFERENCES[what] in told
        assert "Build the same model and optimizer" in told


def test_those_who_must_may_have_other_optimizers() -> None:
    work = partial(start_with_other_optimizers, what="lr", mode="sync", divergence_guard=False)
    assert syncline.run(work, WORLD, "threads", DEADLINES) == [""] * WORLD


@pytest.mark.parametrize("world", [2, 3, 7, 64, 128])
def test_one_rank_with_another_digest_is_seen_in_the_status(world: int) -> None:
    def status(digests: list[int]) -> PassStatus:
        rows = [write_status(OwnStatus(1, 1, digest=digest), [], rank, world) for rank, digest in enumerate(digests)]
        return read_status([sum(words) for words in zip(*rows, strict=True)], [], world)

    same = [2**24 - 1] * world
    assert not status(same).differs
    assert status([*same[1:], 2**24 - 2]).differs
    assert status([0, *same[1:]]).differs


def test_the_guard_says_what_it_takes() -> None:
    def work(fabric: syncline.Fabric, guarded: bool) -> syncline.tracing.totals.Totals:
        from support.trainees import Trainee

        trainee = Trainee(fabric, "sync", HEAVY, divergence_guard=guarded)
        trainee.train(5)
        totals = trainee.sync.report()
        trainee.sync.close()
        return totals

    for totals in syncline.run(partial(work, guarded=True), 2, "threads", DEADLINES):
        assert 0 < totals.guard_s < totals.step_s
        assert "; guard " in str(totals)
    for totals in syncline.run(partial(work, guarded=False), 2, "threads", DEADLINES):
        assert totals.guard_s == 0
        assert "guard" not in str(totals)
