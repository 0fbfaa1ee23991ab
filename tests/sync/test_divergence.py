"""Replicas that drift apart are found, and named."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import syncline
from support import drifting
from support.catalogue import PROCESS_FABRICS
from support.drifting import Tampers
from support.guarded import train
from support.replicas import DTYPES, WORLD, assert_replicas, same, train_threads
from syncline import Deadlines
from syncline.guards.divergence import digest_of

CHANGES = {
    "a bit": (drifting.flip_a_bit, "second.weight"),
    "the sign of a zero": (drifting.change_a_sign_of_zero, "second.weight"),
    "two elements swapped": (drifting.swap_two, "second.weight"),
    "optimizer state": (drifting.change_optimizer_state, "optimizer state exp_avg of second.weight"),
    "lost optimizer state": (drifting.lose_optimizer_state, "of second.weight"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_replica_that_differs_is_named_on_every_rank_with_what_differs(change: str) -> None:
    tamper, name = CHANGES[change]
    for rank in train_threads(5, before_step=Tampers(3, tamper), check_every=1):
        assert rank.error == "ReplicasDiverged", rank.message
        assert "replicas differ before step 3: " in rank.message
        assert name in rank.message
        assert "on rank 1 it is not what the others have" in rank.message
        assert len(rank.parameters) == 3


@pytest.mark.slow
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_a_flipped_bit_is_found_on_every_fabric(fabric: str) -> None:
    work = partial(train, steps=4, before_step=Tampers(2, drifting.flip_a_bit), check_every=1)
    for rank in syncline.run(work, WORLD, fabric, Deadlines(20.0)):
        assert rank.error == "ReplicasDiverged", rank.message
        assert "second.weight is the first of 1 tensors of 24 that do; on rank 1 it is not" in rank.message


def test_of_two_ranks_nobody_says_which_one_is_wrong() -> None:
    for rank in train_threads(5, world=2, before_step=Tampers(3, drifting.flip_a_bit), check_every=1):
        assert rank.error == "ReplicasDiverged"
        assert "second.weight" in rank.message
        assert "there is no majority to say which rank is wrong" in rank.message


@pytest.mark.parametrize(("every", "noticed"), [(1, 3), (2, 4), (5, 5)])
def test_replicas_are_compared_every_so_many_steps(every: int, noticed: int) -> None:
    settings = {"check_every": every, "divergence_guard": False}
    for rank in train_threads(6, before_step=Tampers(3, drifting.flip_a_bit), **settings):
        assert rank.error == "ReplicasDiverged"
        assert f"before step {noticed}:" in rank.message
        assert len(rank.parameters) == noticed


def test_without_the_guard_replicas_are_not_compared_unasked() -> None:
    ranks = train_threads(4, before_step=Tampers(2, drifting.flip_a_bit), divergence_guard=False)
    assert [rank.error for rank in ranks] == [""] * WORLD
    assert not same(ranks[0].at_the_end, ranks[1].at_the_end)


@pytest.mark.parametrize(
    ("fabric", "kind"),
    [
        ("threads", "foreach"),
        ("threads", "fused"),
        ("torch", "foreach"),
        pytest.param("shm", "fused", marks=pytest.mark.slow),
    ],
)
def test_ordinary_training_raises_no_alarm(fabric: str, kind: str) -> None:
    adamw = partial(torch.optim.AdamW, lr=0.05, **{kind: True})
    ranks = syncline.run(partial(train, steps=10, optimizer=adamw, check_every=1), WORLD, fabric, Deadlines(20.0))
    assert [rank.error for rank in ranks] == [""] * WORLD
    assert_replicas(ranks)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool])
def test_every_bit_and_its_place_is_in_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).remainder(2).to(dtype)
    digests = {digest_of(tensor), digest_of(tensor.flip(0)), digest_of(torch.zeros_like(tensor))}
    for place in range(len(tensor)):
        changed = tensor.clone()
        changed.view(torch.uint8)[place * dtype.itemsize] ^= 1
        digests.add(digest_of(changed))
    assert len(digests) == 3 + len(tensor)


def test_a_digest_is_of_values_and_not_of_strides() -> None:
    square = torch.arange(9.0).view(3, 3)
    assert digest_of(square.t()) == digest_of(square.t().contiguous()) != digest_of(square)
    assert digest_of(torch.zeros(0)) == digest_of(torch.zeros(0, 3))
