"""Ranks with different numbers of batches or of backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import syncline
from support.batches import Batch, fill
from support.catalogue import FABRICS, PROCESS_FABRICS
from support.losses import squared_in_single
from support.models import Pair, mlp, normalized
from support.references import same_bits
from support.runs import DEADLINES
from support.scenarios import (
    ADAM,
    PLAIN,
)
from support.trainees import HEAVY, Trainee, place_of
from support.uneven_backwards import (
    Refused,
    Unequal,
    join_in_pairs,
    make_many_passes,
    make_unequal_passes,
    train_unequally_alone,
    train_with_no_sync,
)
from support.uneven_batches import (
    Uneven,
    train_unevenly,
    train_unevenly_alone,
    train_unevenly_in_turn,
    train_unevenly_with_ddp,
)
from support.weights import assert_close, assert_replicas
from syncline.errors import ConfigError

# Uneven inputs

COMPARED = replace(PLAIN, model=normalized, optimizers=ADAM, settings={"check_every": 1})
COUNTS = [(5, 3), (3, 5), (0, 4), (4, 0), (4, 2, 6), (5, 0, 5), (0, 0, 0)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("divide_by", ["world", "active"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_ranks_with_fewer_batches_keep_the_others_company(counts: tuple[int, ...], divide_by: str) -> None:
    uneven = Uneven(counts, divide_by)
    ranks = syncline.run(partial(train_unevenly, uneven=uneven), len(counts), "threads", DEADLINES)
    for when, alone in enumerate(train_unevenly_alone(uneven)):
        results = [result[when] for result in ranks]
        assert_replicas(results)
        assert_close(results[0].parameters, alone.parameters, 1e-10)
        torch.testing.assert_close(results[0].state, alone.state, rtol=1e-10, atol=1e-10)


def test_ranks_that_keep_company_are_not_taken_for_diverged() -> None:
    uneven = Uneven((5, 2), "world", COMPARED)
    first, second = syncline.run(partial(train_unevenly, uneven=uneven), 2, "threads", DEADLINES)
    assert_replicas([first[1], second[1]])


@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_processes_keep_each_other_company(fabric: str) -> None:
    cases = [Uneven(counts, "active") for counts in ((5, 3), (2, 4))]
    ranks = syncline.run(partial(train_unevenly_in_turn, cases=cases), 2, fabric, DEADLINES)
    for case, uneven in enumerate(cases):
        results = [result[case][1] for result in ranks]
        assert_replicas(results)
        assert_close(results[0].parameters, train_unevenly_alone(uneven)[1].parameters, 1e-10)


def test_uneven_inputs_end_as_they_do_with_ddp() -> None:
    cases = [Uneven(counts, how) for counts in ((5, 3), (2, 5)) for how in ("world", "active")]
    with_join = syncline.run(partial(train_unevenly_with_ddp, cases=cases), 2, "torch", DEADLINES)
    for case, uneven in enumerate(cases):
        joined, _ = syncline.run(partial(train_unevenly, uneven=uneven), 2, "threads", DEADLINES)[0]
        for results in with_join:
            assert_close(joined.parameters, results[case].parameters, 1e-10)


# Ranks that make different numbers of backward passes before a step

TWICE = replace(PLAIN, settings={"accumulate": 2})
CODED = replace(PLAIN, settings={"codec": "topk:keep=0.1"}, model=partial(mlp, torch.float32), loss=squared_in_single)
REFUSED = {
    "2 and 1": (Unequal((2, 1)), "pass 2 since the last step of rank 0, and pass 1 since the last step of rank 1"),
    "1 and 2": (Unequal((1, 2)), "pass 1 since the last step of rank 0, and pass 2 since the last step of rank 1"),
    "3 and 2": (Unequal((3, 2)), "pass 3 since the last step of rank 0, and pass 1 since the last step of rank 1"),
    "1, 3 and 1": (Unequal((1, 3, 1)), "pass 1 since the last step of ranks 0, 2, and pass 2 since the last step of"),
    "accumulated": (Unequal((4, 2), scenario=TWICE), "pass 2 since the last step of rank 0, and pass 1 since the"),
    "with a codec": (Unequal((1, 2), scenario=CODED), "pass 1 since the last step of rank 0, and pass 2 since the"),
}


def assert_refused(ranks: Sequence[Refused], text: str) -> None:
    """All of them, in the same pass, which changed nothing, and once and for all."""
    for refused in ranks:
        assert isinstance(refused, Refused), refused
        assert text in refused.error
        assert "sync.no_sync()" in refused.error
        assert refused.number == ranks[0].number
        assert refused.again == [refused.error] * 3
        assert all(same_bits(one, other) for one, other in zip(refused.before, refused.after, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_a_pass_is_refused_if_some_ranks_have_stepped_since_the_last_one_and_others_have_not(name: str) -> None:
    unequal, text = REFUSED[name]
    world = len(unequal.counts)
    assert_refused(syncline.run(partial(make_unequal_passes, unequal=unequal), world, "threads", DEADLINES), text)


@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
@pytest.mark.parametrize("name", ["2 and 1", "with a codec"])
def test_processes_that_make_different_numbers_of_passes_are_refused(name: str, fabric: str) -> None:
    unequal, text = REFUSED[name]
    assert_refused(syncline.run(partial(make_unequal_passes, unequal=unequal), 2, fabric, DEADLINES), text)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_waits_for_one_that_has_left_after_fewer_passes_is_told(fabric: str) -> None:
    """There is no pass of the other's to compare with."""
    waits, left = syncline.run(partial(make_unequal_passes, unequal=Unequal((2, 1), steps=1)), 2, fabric, DEADLINES)
    assert left == "went well"
    assert waits.startswith("PeerLost: rank 1 ")
    assert "stepped after fewer passes (wrap all but the last in sync.no_sync())" in waits


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 3, 7])
def test_many_backward_passes_before_a_step_are_not_taken_for_different_numbers(world: int) -> None:
    """More than are told apart, in 16 bits."""
    assert_replicas(syncline.run(partial(make_many_passes, count=65), world, "threads", DEADLINES))


@pytest.mark.parametrize("counts", [(3, 1), (1, 2, 4)], ids=str)
def test_ranks_may_make_different_numbers_of_passes_with_no_sync(counts: tuple[int, ...]) -> None:
    unequal = Unequal(counts)
    ranks = syncline.run(partial(train_with_no_sync, unequal=unequal), len(counts), "threads", DEADLINES)
    assert_replicas(ranks)
    assert_close(ranks[0].parameters, train_unequally_alone(unequal).parameters, 1e-10)


@pytest.mark.parametrize("batches", [(5, 6), (4, 3), (6, 3, 5)], ids=str)
def test_ranks_that_joined_between_two_passes_of_a_step_train_on(batches: tuple[int, ...]) -> None:
    assert_replicas(syncline.run(partial(join_in_pairs, batches=batches), len(batches), "threads", DEADLINES))


@pytest.mark.parametrize("mode", ["sync", "local:every=2"])
@pytest.mark.parametrize("by_batch", [True, False])
def test_learning_rates_that_differ_after_join_are_warned_of(
    mode: str, by_batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """On all ranks; a schedule that is stepped once for each `join` is all right."""

    def work(fabric: syncline.Fabric) -> None:
        trainee = Trainee(fabric, mode)
        scheduler = StepLR(trainee.optimizer, 1, 0.5)
        with trainee.sync.join():
            for _ in range((2, 4, 3)[fabric.rank]):
                trainee.step()
                if by_batch:
                    scheduler.step()
        if not by_batch:
            scheduler.step()

    syncline.run(work, 3, "threads", DEADLINES)
    told = [record.getMessage() for record in caplog.records if "learning rates differ" in record.message]
    assert len(told) == (3 if by_batch else 0)
    assert all("equally many steps on all ranks" in message for message in told)


def adversaries(fabric: syncline.Fabric, joined: Callable[[Pair, list[Optimizer]], AbstractContextManager]) -> Tensor:
    """A generator and a critic, whose ranks have different numbers of batches."""
    pair = fill(Pair(), fabric.rank)
    for_generator, for_critic = optimizers = [HEAVY(part.parameters()) for part in (pair.generator, pair.critic)]
    with joined(pair, optimizers):
        for step in range((2, 4, 3)[fabric.rank]):
            batch = Batch(fabric.rank, step)
            for_critic.zero_grad()
            (pair.critic(batch.y) - pair.critic(pair.generator(batch.x).detach())).mean().backward()
            for_critic.step()
            for_generator.zero_grad()
            pair.critic(pair.generator(batch.x)).mean().backward()
            for_generator.step()
    return place_of(pair)


def test_two_joins_at_once_are_refused_and_one_of_both_models_is_not() -> None:
    @contextmanager
    def both(fabric: syncline.Fabric, pair: Pair, optimizers: list[Optimizer]) -> Iterator[None]:
        first, second = (
            syncline.Sync(part, optimizer, fabric=fabric)
            for part, optimizer in zip((pair.generator, pair.critic), optimizers, strict=True)
        )
        with first.join(), second.join():
            yield

    def work(fabric: syncline.Fabric) -> tuple[str, Tensor]:
        with pytest.raises(ConfigError) as refused:
            adversaries(fabric, partial(both, fabric))
        together = adversaries(fabric, lambda *given: syncline.Sync(*given, fabric=fabric, check_every=1).join())
        return str(refused.value), together

    ranks = syncline.run(work, 3, "threads", DEADLINES)
    for message, place in ranks:
        assert "make one Sync of all models, in an nn.ModuleList" in message
        assert same_bits(place, ranks[0][1])
