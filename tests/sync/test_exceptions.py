"""Forward and backward passes that fail, and loops that go on."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import syncline
from support.batches import Batch, fill
from support.catalogue import PROCESS_FABRICS
from support.failing import (
    Failing,
    be_surprised,
    fail_and_go_on,
    fail_in_one_of_two_backwards,
    fail_in_turn,
    lose_batches,
    surprised_alone,
    two_backwards_without_failed_steps,
    without_failed_batches,
    without_failed_steps,
    without_lost_batches,
)
from support.losses import squared
from support.models import mlp
from support.runs import DEADLINES
from support.scenarios import (
    of_layers,
)
from support.weights import assert_close, assert_replicas
from syncline.codecs.none import void
from syncline.errors import RankFailed


def clip_without_gradients(fabric: syncline.Fabric, waits: bool) -> Tensor:
    """Rank 1 fails in a forward pass, and all clip what they have."""
    model = fill(mlp(), seed=0)
    optimizer = AdamW(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric)
    for step in range(4):
        optimizer.zero_grad()
        if (fabric.rank, step) != (1, 2):
            (50 * squared(model, Batch(fabric.rank, step))).backward()
        if waits:
            sync.wait()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_ranks_that_clip_what_another_does_not_have_are_refused() -> None:
    with pytest.raises(RankFailed, match=r"changed since backward \(clipped\?\).*call sync.wait\(\) before that"):
        syncline.run(partial(clip_without_gradients, waits=False), 3, "threads", DEADLINES)


def test_ranks_that_wait_before_they_clip_stay_equal() -> None:
    one, *others = syncline.run(partial(clip_without_gradients, waits=True), 3, "threads", DEADLINES)
    assert all(torch.equal(one, other) for other in others)


INSIDE = ("between gradients", "after most gradients", "after all gradients")


@pytest.mark.parametrize("then", ["step", "next"])
@pytest.mark.parametrize("ranks", [{0}, {2}, {0, 1, 2}], ids=str)
@pytest.mark.parametrize("where", INSIDE)
def test_a_step_whose_backward_fails_anywhere_is_skipped_everywhere(where: str, ranks: set[int], then: str) -> None:
    failing = Failing(where, frozenset(ranks), then)
    results = syncline.run(partial(fail_and_go_on, failing=failing), 3, "threads", DEADLINES)
    assert_replicas(results)
    assert_close(results[0].parameters, without_failed_steps(failing, 3).parameters, 1e-10)


@pytest.mark.parametrize("where", ["in forward", "before all gradients"])
@pytest.mark.parametrize("ranks", [{0}, {2}, {0, 1, 2}], ids=str)
def test_a_rank_that_fails_before_any_gradient_and_calls_step_has_nothing_to_say(where: str, ranks: set[int]) -> None:
    failing = Failing(where, frozenset(ranks), "step")
    results = syncline.run(partial(fail_and_go_on, failing=failing), 3, "threads", DEADLINES)
    assert_replicas(results)
    assert_close(results[0].parameters, without_failed_batches(failing, 3).parameters, 1e-10)


@pytest.mark.parametrize("ranks", [{1}, {0, 1}], ids=str)
@pytest.mark.parametrize("where", INSIDE)
def test_every_optimizer_skips_a_step_whose_backward_failed(where: str, ranks: set[int]) -> None:
    failing = Failing(where, frozenset(ranks), "step", optimizers=of_layers)
    results = syncline.run(partial(fail_and_go_on, failing=failing), 2, "threads", DEADLINES)
    assert_replicas(results)
    assert_close(results[0].parameters, without_failed_steps(failing, 2).parameters, 1e-10)


@pytest.mark.parametrize("where", ["in forward", "before all gradients"])
@pytest.mark.parametrize("ranks", [{0}, {0, 2}], ids=str)
def test_ranks_that_lose_batches_before_any_gradient_can_join(where: str, ranks: set[int]) -> None:
    failing = Failing(where, frozenset(ranks), "next")
    results = syncline.run(partial(lose_batches, failing=failing), 3, "threads", DEADLINES)
    assert_replicas(results)
    assert_close(results[0].parameters, without_lost_batches(failing, 3).parameters, 1e-10)


@pytest.mark.parametrize("where", ["in forward", *INSIDE])
def test_all_ranks_fail_and_go_on_with_the_next_batch(where: str) -> None:
    failing = Failing(where, frozenset({0, 1}), "next")
    results = syncline.run(partial(fail_and_go_on, failing=failing), 2, "threads", DEADLINES)
    assert_replicas(results)
    assert_close(results[0].parameters, without_failed_steps(failing, 2).parameters, 1e-10)


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ranks", [{0}, {1}], ids=str)
def test_a_step_is_skipped_if_one_of_its_backwards_fails(ranks: set[int], accumulate: int, first: bool) -> None:
    failing = Failing("between gradients", frozenset(ranks), "step", settings=(("accumulate", accumulate),))
    results = syncline.run(partial(fail_in_one_of_two_backwards, failing=failing, first=first), 2, "threads", DEADLINES)
    assert_replicas(results)
    assert_close(results[0].parameters, two_backwards_without_failed_steps(failing, 2).parameters, 1e-10)


@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}], ids=str)
def test_a_rank_whose_last_backward_of_a_step_fails_may_go_on_with_the_next_step(ranks: set[int]) -> None:
    failing = Failing("between gradients", frozenset(ranks), "next")
    results = syncline.run(partial(fail_in_one_of_two_backwards, failing=failing, first=False), 2, "threads", DEADLINES)
    assert_replicas(results)
    assert_close(results[0].parameters, two_backwards_without_failed_steps(failing, 2).parameters, 1e-10)


def test_a_gradient_that_comes_too_late_is_an_error_and_the_step_is_skipped_everywhere() -> None:
    ranks = syncline.run(be_surprised, 3, "threads", DEADLINES)
    assert [len(errors) for errors, *_ in ranks] == [0, 1, 0]
    assert "often" in ranks[1][0][0]
    assert "no_sync" in ranks[1][0][0]
    for _, before, after, _ in ranks:
        assert_close(after.parameters, before.parameters, 0.0)
    assert_replicas([final for *_, final in ranks])
    assert_close(ranks[0][-1].parameters, surprised_alone(3).parameters, 1e-10)


@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_processes_fail_and_go_on(fabric: str) -> None:
    cases = [Failing(where, frozenset({1}), then) for where in INSIDE for then in ("step", "next")]
    ranks = syncline.run(partial(fail_in_turn, cases=cases), 2, fabric, DEADLINES)
    for case, failing in enumerate(cases):
        results = [result[case] for result in ranks]
        assert_replicas(results)
        assert_close(results[0].parameters, without_failed_steps(failing, 2).parameters, 1e-10)


def fail(gradient: Tensor) -> None:
    raise ArithmeticError


def senders_of_a_failed_pass(fabric: syncline.Fabric) -> tuple[list[str], int]:
    """Threads that send after an exception in backward, and the number of buckets."""
    model = fill(mlp(), seed=0)
    optimizer = AdamW(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, first_bucket_bytes=1, bucket_bytes=1)
    squared(model, Batch(fabric.rank, 0)).backward()
    optimizer.step()
    start, senders = sync.reducer.path.start, []

    def note_sender(*arguments: Any) -> None:
        senders.append(threading.current_thread().name)
        start(*arguments)

    sync.reducer.path.start = note_sender
    model[0].register_forward_hook(lambda *given: void(given[-1].register_hook(fail)))
    with pytest.raises(ArithmeticError):
        squared(model, Batch(fabric.rank, 1)).backward()
    optimizer.step()
    sync.close()
    return senders, len(sync.buckets)


def test_no_destructor_sends_what_a_failed_backward_pass_has_not_sent() -> None:
    for rank, (senders, buckets) in enumerate(syncline.run(senders_of_a_failed_pass, 2, "threads", DEADLINES)):
        assert len(senders) == buckets
        assert senders[-1] == f"rank {rank} ends a failed pass"
