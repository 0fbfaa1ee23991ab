"""`Sync`: ranks that train on their own batches do what one process does on all of them, whatever the loop is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from batches import INPUTS, STEPS, Batch
from catalogue import FABRICS, PROCESS_FABRICS
from failing import (
    Failing,
    be_surprised,
    fail_and_go_on,
    fail_in_one_of_two_backwards,
    fail_in_turn,
    leave_it,
    lose_batches,
    surprised_alone,
    two_backwards_without_failed_steps,
    without_failed_batches,
    without_failed_steps,
    without_lost_batches,
)
from inspected import (
    buckets_before_and_after,
    count_messages,
    gradients_between,
    in_a_world_of_one,
    in_an_order_of_its_own,
    local_gradients,
    make_one_after_the_other,
    memory_of_gradients,
    watch_buckets_leave,
)
from losses import squared_in_single
from models import mlp, normalized
from references import same_bits
from runs import DEADLINES, Result, Run
from scenarios import (
    ADAM,
    COMPILED,
    PLAIN,
    SCENARIOS,
    of_layers,
    train_all,
    train_all_with_ddp,
    train_alone,
    train_named,
)
from torch import Tensor
from uneven_backwards import (
    Refused,
    Unequal,
    join_in_pairs,
    make_many_passes,
    make_unequal_passes,
    train_unequally_alone,
    train_with_no_sync,
)
from uneven_batches import Uneven, train_unevenly, train_unevenly_alone, train_unevenly_in_turn, train_unevenly_with_ddp

import syncline
from syncline.buckets.assign import Item, assign
from syncline.buckets.turns import MOST_TURNS
from syncline.errors import RankFailed
from syncline.units import MIB

WORLD = 2  # of processes
WITH_DDP = tuple(name for name, scenario in SCENARIOS.items() if scenario.ddp is not None)
EXACT = ["plain", "several backwards", "AdamW, fused", "branches", "adversaries", "checkpoint, reentrant"]


def assert_replicas(ranks: Sequence[Result], buffers: bool = True) -> None:
    """All ranks have the same bits, and have seen the same."""
    for result in ranks[1:]:
        assert len(result.state) == len(ranks[0].state)
        pairs = zip(ranks[0].tensors(buffers), result.tensors(buffers), strict=True)
        assert all(same_bits(one, other) for one, other in pairs)
        assert result.noted == ranks[0].noted


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


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
    scenario = {**SCENARIOS, **COMPILED}[name]
    assert_replicas(ranks, buffers=not have_local_buffers(name))
    assert_close(ranks[0].parameters, train_alone(scenario, WORLD).parameters, scenario.tolerance)


@pytest.mark.parametrize("name", WITH_DDP)
def test_ranks_do_what_ddp_does(name: str) -> None:
    ddp = with_ddp()[0][name]
    ranks = syncline.run(partial(train_named, name=name), WORLD, "threads", DEADLINES)
    assert_close(ranks[0].parameters, ddp.parameters, SCENARIOS[name].tolerance)
    assert ranks[0].noted == ddp.noted


@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_every_fabric_gives_the_same_bits(fabric: str) -> None:
    threads = syncline.run(partial(train_all, names=EXACT), WORLD, "threads", DEADLINES)[0]
    processes = in_processes(fabric)[0]
    for name in EXACT:
        assert_replicas([threads[name], processes[name]])


# Gradients


@pytest.mark.parametrize("name", ["plain", "branches", "sparse, SGD", "channels last", "mixed types"])
def test_gradients_are_means_as_soon_as_backward_returns(name: str) -> None:
    ranks = syncline.run(partial(gradients_between, name=name), 3, "threads", DEADLINES)
    alone = local_gradients(Run(SCENARIOS[name], range(3), 3, seed=0))
    for seen in ranks:
        torch.testing.assert_close(seen, alone, rtol=SCENARIOS[name].tolerance, atol=SCENARIOS[name].tolerance)


def test_a_parameter_that_no_rank_uses_has_no_gradient_and_keeps_its_bits() -> None:
    """Not even weight decay touches it, as in one process."""
    scenario = SCENARIOS["branches"]
    never = [position for position, name in enumerate(dict(scenario.model().named_parameters())) if "never" in name]
    for seen in syncline.run(partial(gradients_between, name="branches"), 3, "threads", DEADLINES):
        assert all(gradients[position] is None for gradients in seen for position in never)
    start = dict(Run(scenario, [0], 1, seed=0).model.named_parameters())
    for result in syncline.run(partial(train_named, name="branches"), 3, "threads", DEADLINES):
        assert all(same_bits(p, start[name].detach()) for name, p in result.parameters.items() if "never" in name)


def test_gradients_share_the_memory_of_their_buckets() -> None:
    for gradients, storages, buckets in syncline.run(
        partial(memory_of_gradients, name="plain"), 2, "threads", DEADLINES
    ):
        assert 1 < storages == buckets < gradients


def test_channels_last_gradients_have_the_strides_of_their_parameters() -> None:
    for result in syncline.run(partial(train_named, name="channels last"), 2, "threads", DEADLINES):
        assert all(result.noted)


# Buckets


def resnet18() -> list[tuple[int, ...]]:
    """The shapes of its parameters in order of registration."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, inputs, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and inputs != width:
                shapes += [(width, inputs, 1, 1), (width,), (width,)]
            inputs = width
    return [*shapes, (1000, 512), (1000,)]


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [(25 * MIB, [2_052_000, 28_852_224, 15_853_824]), (35 * MIB, [2_052_000, 38_297_600, 6_408_448])],
)
def test_the_buckets_of_resnet18_are_those_of_ddp(bucket_bytes: int, expected: list[int]) -> None:
    items = [Item(4 * torch.Size(shape).numel(), torch.float32) for shape in reversed(resnet18())]
    buckets = assign(items, MIB, bucket_bytes)
    assert [sum(items[position].nbytes for position in bucket) for bucket in buckets] == expected
    assert [position for bucket in buckets for position in bucket] == [*range(62)]


def test_buckets_follow_the_order_in_which_gradients_come_on_rank_0() -> None:
    """Before the first step it is the reverse of registration; what did not come is last."""
    order = partial(buckets_before_and_after, loss=in_an_order_of_its_own)
    for before, *after in syncline.run(order, 3, "threads", DEADLINES):
        assert parts_in_order(before) == ["never", "here_and_there", "sometimes", "always"]
        assert all(parts_in_order(names) == ["always", "here_and_there", "sometimes", "never"] for names in after)
        assert all(len(names) == len(before) > 4 for names in after)


def parts_in_order(buckets: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(name.split(".")[0] for bucket in buckets for name in bucket))


def test_buckets_leave_while_the_backward_pass_goes_on() -> None:
    """From the second step on: in the first one the order of gradients is only observed."""
    for first, *others in syncline.run(watch_buckets_leave, 3, "threads", DEADLINES):
        names = [event for event in first if event != "left"]
        assert len(names) == 6
        assert first[: len(names)] == names
        for events in others:
            assert events.count("left") == first.count("left") > 2
            last_gradient = max(position for position, event in enumerate(events) if event != "left")
            assert events[:last_gradient].count("left") >= events.count("left") - 2


@pytest.mark.parametrize("name", ["plain", "sparse, SparseAdam", "two models, one optimizer"])
def test_a_gradient_is_sent_once_in_a_step(name: str) -> None:
    assert syncline.run(partial(count_messages, name=name), 2, "threads", DEADLINES) == [0, 0]


@pytest.mark.parametrize("fabric", ["threads", *PROCESS_FABRICS])
def test_one_is_closed_and_another_made_many_times(fabric: str) -> None:
    ranks = syncline.run(partial(make_one_after_the_other, count=20), 2, fabric, syncline.Deadlines(5.0, join=5.0))
    assert all(same_bits(weight, ranks[0][0]) for weights in ranks for weight in weights)


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


# Uneven inputs


COMPARED = replace(PLAIN, model=normalized, optimizers=ADAM, settings={"check_every": 1})
COUNTS = [(5, 3), (3, 5), (0, 4), (4, 0), (4, 2, 6), (5, 0, 5), (0, 0, 0)]


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
    assert_refused(syncline.run(partial(make_unequal_passes, unequal=unequal), WORLD, fabric, DEADLINES), text)


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
    assert_replicas(syncline.run(partial(make_many_passes, count=MOST_TURNS + 3), world, "threads", DEADLINES))


@pytest.mark.parametrize("counts", [(3, 1), (1, 2, 4)], ids=str)
def test_ranks_may_make_different_numbers_of_passes_with_no_sync(counts: tuple[int, ...]) -> None:
    unequal = Unequal(counts)
    ranks = syncline.run(partial(train_with_no_sync, unequal=unequal), len(counts), "threads", DEADLINES)
    assert_replicas(ranks)
    assert_close(ranks[0].parameters, train_unequally_alone(unequal).parameters, 1e-10)


@pytest.mark.parametrize("batches", [(5, 6), (4, 3), (6, 3, 5)], ids=str)
def test_ranks_that_joined_between_two_passes_of_a_step_train_on(batches: tuple[int, ...]) -> None:
    assert_replicas(syncline.run(partial(join_in_pairs, batches=batches), len(batches), "threads", DEADLINES))


# Exceptions


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
