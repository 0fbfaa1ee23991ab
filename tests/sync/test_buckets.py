"""Gradients and the buckets they are in."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import syncline
from support.catalogue import PROCESS_FABRICS
from support.inspected import (
    buckets_before_and_after,
    count_messages,
    gradients_between,
    in_an_order_of_its_own,
    local_gradients,
    make_one_after_the_other,
    memory_of_gradients,
    watch_buckets_leave,
)
from support.references import same_bits
from support.runs import DEADLINES, Run
from support.scenarios import (
    SCENARIOS,
    train_named,
)
from support.weights import assert_close
from syncline.core.plan import Gradient, assign
from syncline.units import MIB

# Gradients


@pytest.mark.parametrize("name", ["plain", "branches", "sparse, SGD", "channels last", "mixed types"])
def test_gradients_are_means_as_soon_as_backward_returns(name: str) -> None:
    ranks = syncline.run(partial(gradients_between, name=name), 3, "threads", DEADLINES)
    alone = local_gradients(Run(SCENARIOS[name], range(3), 3, seed=0))
    for seen in ranks:
        for gradients, expected in zip(seen, alone, strict=True):
            assert_close(gradients, expected, SCENARIOS[name].tolerance)


def test_a_parameter_that_no_rank_uses_has_no_gradient_and_keeps_its_bits() -> None:
    """Not even weight decay touches it, as in one process."""
    scenario = SCENARIOS["branches"]
    for seen in syncline.run(partial(gradients_between, name="branches"), 3, "threads", DEADLINES):
        assert all(gradients and not any("never" in name for name in gradients) for gradients in seen)
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
    shapes = enumerate(reversed(resnet18()))
    gradients = [Gradient(str(at), 4 * torch.Size(shape).numel(), torch.float32) for at, shape in shapes]
    buckets = assign(gradients, MIB, bucket_bytes)
    assert [sum(gradients[int(name)].nbytes for name in bucket) for bucket in buckets] == expected
    assert [name for bucket in buckets for name in bucket] == [str(at) for at in range(62)]


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
    ranks = syncline.run(partial(make_one_after_the_other, count=20), 2, fabric, syncline.Deadlines(20.0, join=20.0))
    assert all(same_bits(weight, ranks[0][0]) for weights in ranks for weight in weights)
