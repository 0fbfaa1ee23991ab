"""The divergence guard and loops that do unusual things: what is right stays silent, what is not is found."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import syncline
from support import guarded_loops
from support.guarded import Net, batch, filled
from support.guarded_loops import LARGE, Ended, Loop, run_loop, simple_step
from support.references import same_bits
from support.trainees import DEADLINES
from syncline.errors import ReplicasDiverged
from syncline.guards.fingerprint import LOOKED_AT, MOST_KINDS
from syncline.guards.rolling import SMALLEST_WINDOW_BYTES

RIGHT: dict[str, tuple[Loop, int]] = {  # and how many comparisons of everything it may cost in 12 steps
    "L-BFGS": (guarded_loops.lbfgs, 1),  # it begins its state before its first pass
    "sharpness aware": (guarded_loops.sharpness_aware, 2 * LOOKED_AT),
    "a teacher that follows": (guarded_loops.with_a_teacher, LOOKED_AT),
    "adversaries": (guarded_loops.adversaries, LOOKED_AT),
    "a functional optimizer": (guarded_loops.functional, 0),
    "a sharded optimizer": (guarded_loops.sharded, 2),
    "parameters of no model": (guarded_loops.with_strangers, 0),
    "one evaluates alone": (guarded_loops.one_evaluates_alone, 4),
}


def run(loop: Loop, steps: int = 12, world: int = 3, fabric: str = "threads") -> list[Ended]:
    return syncline.run(partial(run_loop, loop=loop, steps=steps), world, fabric, DEADLINES)


@pytest.mark.parametrize("name", RIGHT)
def test_a_loop_that_keeps_replicas_equal_is_left_alone(name: str) -> None:
    loop, comparisons = RIGHT[name]
    ranks = run(loop)
    for rank in ranks:
        assert not rank.error
        assert all(map(same_bits, rank.weights, ranks[0].weights))
        assert rank.comparisons <= comparisons <= MOST_KINDS * LOOKED_AT


def test_the_state_of_torchs_sharded_optimizer_is_nobody_elses() -> None:
    ranks = run(guarded_loops.zero_redundancy, fabric="torch", world=2)
    for rank in ranks:
        assert not rank.error
        assert rank.comparisons <= 1
        assert all(map(same_bits, rank.weights, ranks[0].weights))


def test_an_embedding_that_scales_the_rows_of_its_own_batch_is_found() -> None:
    for rank in run(guarded_loops.rows_of_bounded_norm):
        assert rank.error.startswith("ReplicasDiverged: replicas differ before step 1: table.weight is the first of 1 ")


WINDOWS = -(-3 * 4 * LARGE * (LARGE + 12) // SMALLEST_WINDOW_BYTES)


def test_what_has_no_version_is_found_when_its_window_comes() -> None:
    assert WINDOWS > 10
    for rank in run(guarded_loops.edited_without_version, steps=2 + WINDOWS, world=2):
        assert "1.weight is the first of 1 tensors" in rank.error


@pytest.mark.parametrize(
    ("loop", "step"),
    [
        (guarded_loops.edited_differently, 3),
        (partial(guarded_loops.edited_differently, mode="local:every=9,warmup=9"), 3),
        (guarded_loops.loaded_differently, 3),
        (guarded_loops.began_differently, 1),
    ],
)
def test_whatever_is_touched_is_compared_at_once(loop: Loop, step: int) -> None:
    for rank in run(loop, steps=4, world=2):
        assert rank.error.startswith(f"ReplicasDiverged: replicas differ before step {step}: ")
        assert "1.weight is the first of 1 tensors" in rank.error


@pytest.mark.parametrize("layer", [150, 151, 152])
def test_a_load_is_seen_whether_or_not_its_tensor_is_in_the_sample(layer: int) -> None:
    for rank in run(partial(guarded_loops.one_of_many_is_loaded, layer=layer), steps=4, world=2):
        assert f"replicas differ before step 3: {layer}.weight is the first of 1 tensors" in rank.error


def test_an_error_stays_until_replicas_are_equal_again() -> None:
    def work(fabric: syncline.Fabric) -> list[str]:
        sync, model, step = guarded_loops.edited_differently(fabric)
        saved = {name: weights.clone() for name, weights in model.state_dict().items()}
        told = []
        for number in range(6):
            if number == 4:
                model.load_state_dict(saved)
            try:
                step(number)
                told.append("")
            except ReplicasDiverged as error:
                told.append(str(error).partition(":")[0])
        sync.close()
        return told

    for told in syncline.run(work, 2, "threads", DEADLINES):
        assert told == ["", "", "replicas differ before step 3", "replicas differ before step 4", "", ""]


@pytest.mark.parametrize("counts", [(5, 3), (3, 5), (4, 4)])
@pytest.mark.parametrize("mode", ["sync", "delayed", "local:every=2", "diloco:every=2"])
def test_ranks_without_data_are_not_compared(mode: str, counts: tuple[int, int]) -> None:
    def work(fabric: syncline.Fabric) -> tuple[int, list[Tensor]]:
        model = filled(Net())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
        step = simple_step(fabric, model, optimizer)
        for _ in range(2):
            with sync.join():
                for number in range(counts[fabric.rank]):
                    step(number)
            schedule.step()
        sync.drain()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        guard = getattr(sync.driver, "guard", None)
        sync.close()
        return guard.comparisons if guard is not None else 0, weights

    (compared, mine), (_, theirs) = syncline.run(work, 2, "threads", DEADLINES)
    assert all(map(same_bits, mine, theirs))
    assert not compared or mode == "delayed"


def test_a_schedule_that_fewer_batches_have_moved_less_is_refused_after_join() -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = filled(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        sync = syncline.Sync(model, optimizer, fabric=fabric)
        step = simple_step(fabric, model, optimizer)
        with sync.join():
            for number in range(3 + fabric.rank):
                step(number)
                schedule.step()
        try:
            step(9)
        except ReplicasDiverged as error:
            return str(error)
        return ""

    for told in syncline.run(work, 2, "threads", DEADLINES):
        assert "lr in group 0 of optimizer 0 (SGD) is 0.0125 on rank 0, and 0.00625 on rank 1" in told


def test_a_scale_that_one_rank_loads_is_refused_before_the_step() -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = filled(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        syncline.Sync(model, optimizer, fabric=fabric, scaler=scaler)
        try:
            for number in range(4):
                if number == 2 and fabric.rank == 0:
                    scaler.load_state_dict(scaler.state_dict() | {"scale": 16.0})
                optimizer.zero_grad()
                scaler.scale(model(batch(fabric.rank, number)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        except ReplicasDiverged as error:
            return str(error)
        return ""

    for told in syncline.run(work, 2, "threads", DEADLINES):
        assert "before step 3: the scale of the GradScaler is 16.0 on rank 0, and 64.0 on rank 1" in told
