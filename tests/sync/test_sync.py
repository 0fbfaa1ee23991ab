"""`Sync`: ranks that train on their own batches do what one process does on all of them, whatever the loop is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import syncline
from support.batches import INPUTS, STEPS, Batch
from support.catalogue import PROCESS_FABRICS
from support.failing import (
    leave_it,
)
from support.inspected import (
    in_a_world_of_one,
)
from support.runs import DEADLINES, Result
from support.scenarios import (
    ALL,
    COMPILED,
    SCENARIOS,
    TO_MACHINE_CODE,
    train_all,
    train_all_with_ddp,
    train_alone,
    train_named,
    train_to_machine_code,
)
from support.weights import assert_close, assert_replicas
from syncline.errors import RankFailed

WORLD = 2  # of processes
WITH_DDP = tuple(name for name, scenario in {**SCENARIOS, **COMPILED}.items() if scenario.ddp is not None)
EXACT = ["plain", "several backwards", "AdamW, fused", "branches", "adversaries", "checkpoint, reentrant"]


def have_local_buffers(name: str) -> bool:
    return SCENARIOS[name].settings.get("buffers") == "local" if name in SCENARIOS else False


@cache
def outcome_of(names: tuple[str, ...], train: Callable[..., dict[str, Result]], fabric: str) -> list | RankFailed:
    """All scenarios in one life of each rank, or how that failed."""
    try:
        return syncline.run(partial(train, names=names), WORLD, fabric, DEADLINES)
    except RankFailed as error:
        return error


def in_processes(fabric: str) -> list[dict[str, Result]]:
    return results_of(outcome_of((*SCENARIOS, *COMPILED), train_all, fabric))


def with_ddp() -> list[dict[str, Result]]:
    return results_of(outcome_of(WITH_DDP, train_all_with_ddp, "torch"))


def results_of(outcome: list | RankFailed) -> list[dict[str, Result]]:
    if isinstance(outcome, RankFailed):
        raise outcome
    return outcome


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_do_what_one_process_does_on_the_whole_batch(name: str, world: int) -> None:
    ranks = syncline.run(partial(train_named, name=name), world, "threads", DEADLINES)
    alone = train_alone(SCENARIOS[name], world)
    assert_replicas(ranks, buffers=not have_local_buffers(name))
    assert_close(ranks[0].parameters, alone.parameters, SCENARIOS[name].tolerance)
    assert ranks[0].noted == alone.noted


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
@pytest.mark.parametrize("name", [*SCENARIOS, *COMPILED])
def test_processes_do_what_one_process_does_on_the_whole_batch(name: str, fabric: str) -> None:
    ranks = [results[name] for results in in_processes(fabric)]
    scenario = ALL[name]
    assert_replicas(ranks, buffers=not have_local_buffers(name))
    assert_close(ranks[0].parameters, train_alone(scenario, WORLD).parameters, scenario.tolerance)


@pytest.mark.parametrize("name", WITH_DDP)
def test_ranks_do_what_ddp_does(name: str) -> None:
    ddp = with_ddp()[0][name]
    ours = in_processes("shm")[0][name]
    assert_close(ours.parameters, ddp.parameters, ALL[name].tolerance)
    assert ours.noted == ddp.noted


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_a_model_that_is_compiled_to_machine_code_trains_as_it_does_alone_and_with_ddp(tmp_path: Path) -> None:
    work, patient = partial(train_to_machine_code, folder=str(tmp_path)), syncline.Deadlines(150.0)
    ranks = syncline.run(partial(work, with_ddp=False), WORLD, "shm", patient)
    ddp, *_ = syncline.run(partial(work, with_ddp=True), WORLD, "torch", patient)
    assert list(tmp_path.rglob("*.so"))
    for name, scenario in TO_MACHINE_CODE.items():
        assert_replicas([results[name] for results in ranks])
        assert_close(ranks[0][name].parameters, train_alone(scenario, WORLD).parameters, scenario.tolerance)
        assert_close(ranks[0][name].parameters, ddp[name].parameters, scenario.tolerance)


@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_every_fabric_gives_the_same_bits(fabric: str) -> None:
    threads = syncline.run(partial(train_all, names=EXACT), WORLD, "threads", DEADLINES)[0]
    processes = in_processes(fabric)[0]
    for name in EXACT:
        assert_replicas([threads[name], processes[name]])


# Buffers


def running_means(batches: Sequence[Sequence[Batch]]) -> Tensor:
    """What a normalization of the inputs has seen, if it sees the mean of some batches in each step."""
    mean = torch.zeros(INPUTS, dtype=torch.float64)
    for seen in batches:
        mean = 0.9 * mean + 0.1 * torch.stack([batch.x.mean(dim=0) for batch in seen]).mean(dim=0)
    return mean


def running_variances(batches: Sequence[Sequence[Batch]]) -> Tensor:
    variance = torch.ones(INPUTS, dtype=torch.float64)
    for seen in batches:
        variance = 0.9 * variance + 0.1 * torch.stack([batch.x.var(dim=0) for batch in seen]).mean(dim=0)
    return variance


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("buffers", ["broadcast", "average", "local"])
def test_buffers_have_their_closed_form(buffers: str, world: int) -> None:
    ranks = syncline.run(partial(train_named, name=f"normalized, {buffers}"), world, "threads", DEADLINES)
    for rank, result in enumerate(ranks):
        whose = {"broadcast": [0], "average": range(world), "local": [rank]}[buffers]
        batches = [[Batch(other, step) for other in whose] for step in range(STEPS)]
        torch.testing.assert_close(result.buffers["0.running_mean"], running_means(batches), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result.buffers["0.running_var"], running_variances(batches), rtol=1e-12, atol=1e-12)
        assert result.buffers["0.num_batches_tracked"] == STEPS


def test_broadcast_buffers_are_those_of_ddp() -> None:
    name = "normalized, broadcast"
    for result in syncline.run(partial(train_named, name=name), WORLD, "threads", DEADLINES):
        assert_close(result.buffers, with_ddp()[0][name].buffers, 1e-12)


# A world of one


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "GradScaler" not in name])
def test_a_world_of_one_is_as_if_it_were_not_there(name: str) -> None:
    (result, hooks, buckets), *_ = syncline.run(partial(in_a_world_of_one, name=name), 1, "threads", DEADLINES)
    assert not hooks
    assert not buckets
    assert_replicas([result, train_alone(SCENARIOS[name], 1)])


def test_a_model_whose_sync_is_closed_trains_alone() -> None:
    ranks = syncline.run(leave_it, 3, "threads", DEADLINES)
    assert_replicas([together for together, _ in ranks])
    assert not any(hooks for _, hooks in ranks)
