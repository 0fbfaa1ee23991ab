"""Buffers of modules that are not finite on some ranks: they do not spread, and somebody says so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.batches import Batch, fill
from support.catalogue import PROCESS_FABRICS
from support.losses import squared
from support.models import normalized
from support.references import same_bits
from support.trainees import DEADLINES, PLAIN
from syncline.fabric.threads import Threads
from syncline.modes.buffers import SettledBuffers

NAN, INF = float("nan"), float("inf")
POLICIES = ("broadcast", "average")


def buffers_of(rank: int) -> dict[str, Tensor]:
    """Means, variances and a counter, all of this rank's own."""
    return {
        "mean": torch.arange(4.0) + 10 * rank,
        "variance": torch.full((2, 2), 1.0 + rank, dtype=torch.float64),
        "count": torch.tensor(rank + 1),
    }


def settle(
    fabric: syncline.Fabric, policy: str, bad: Sequence[int], value: float = NAN, root: int = 0, times: int = 1
) -> dict[str, Tensor]:
    """One entry of the means is not finite on some ranks."""
    settled, buffers = SettledBuffers(), buffers_of(fabric.rank)
    if fabric.rank in bad:
        buffers["mean"][1] = value
    for _ in range(times):
        settled.settle(fabric, policy, buffers, root)
    return buffers


def expected_mean(policy: str, good: Sequence[int], root: int) -> Tensor:
    if policy == "broadcast":
        return buffers_of(root if root in good else good[0])["mean"]
    return torch.stack([buffers_of(rank)["mean"] for rank in good]).mean(dim=0)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(("bad", "root"), [([], 0), ([0], 0), ([1], 0), ([0, 1], 1), ([0, 2], 2), ([1, 2], 2)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_buffer_comes_from_the_ranks_on_which_it_is_finite(
    policy: str, bad: list[int], root: int, value: float
) -> None:
    ranks = syncline.run(partial(settle, policy=policy, bad=bad, value=value, root=root), 3, "threads", DEADLINES)
    good = [rank for rank in range(3) if rank not in bad]
    for buffers in ranks:
        assert all(same_bits(buffer, ranks[0][name]) for name, buffer in buffers.items())
        torch.testing.assert_close(buffers["mean"], expected_mean(policy, good, root))
        variances = [1.0 + root] if policy == "broadcast" else [1.0, 2.0, 3.0]
        assert same_bits(buffers["variance"], torch.full((2, 2), sum(variances) / len(variances), dtype=torch.float64))
        assert buffers["count"] == root + 1


@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
@pytest.mark.parametrize("policy", POLICIES)
def test_processes_take_a_buffer_from_the_ranks_on_which_it_is_finite(policy: str, fabric: str) -> None:
    for buffers in syncline.run(partial(settle, policy=policy, bad=[0]), 3, fabric, DEADLINES):
        torch.testing.assert_close(buffers["mean"], expected_mean(policy, [1, 2], 0))


def test_own_buffers_stay_as_they_are() -> None:
    first, second = syncline.run(partial(settle, policy="local", bad=[0]), 2, "threads", DEADLINES)
    assert first["mean"].isnan().tolist() == [False, True, False, False]
    assert same_bits(second["mean"], buffers_of(1)["mean"])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rank_and_the_buffer_are_named(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    syncline.run(partial(settle, policy=policy, bad=[0, 2]), 4, "threads", DEADLINES)
    assert [record.getMessage() for record in caplog.records] == [
        "mean is not finite on ranks 0, 2: all take it from ranks 1, 3"
    ] * 4
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_said_where_all_is_well(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    syncline.run(partial(settle, policy=policy, bad=[]), 3, "threads", DEADLINES)
    assert not caplog.records


@pytest.mark.parametrize("value", [NAN, -INF])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_buffer_that_is_finite_nowhere_is_that_of_one_rank_and_is_said_once(
    policy: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    work = partial(settle, policy=policy, bad=range(3), value=value, root=2, times=4)
    own = buffers_of(2)["mean"]
    own[1] = value
    for buffers in syncline.run(work, 3, "threads", DEADLINES):
        assert same_bits(buffers["mean"], own)
    assert [record.getMessage() for record in caplog.records] == [
        "mean is not finite on ranks 0, 1, 2: no rank has a better one, so that of rank 2 is kept"
    ] * 3


def settle_what_changes(fabric: syncline.Fabric) -> None:
    """One entry is NaN on rank 0, or on all, and another one is new every time."""
    for bad in ([0], range(3)):
        settled = SettledBuffers()
        for time in range(4):
            mean = torch.tensor([NAN if fabric.rank in bad else 1.0, float(time)])
            settled.settle(fabric, "broadcast", {"mean": mean}, 0)


def test_the_same_is_not_said_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    syncline.run(settle_what_changes, 3, "threads", DEADLINES)
    assert len(caplog.records) == 3 * 2


def a_mask() -> Tensor:
    """Minus infinity above numbers whose means over seven ranks are not all themselves, to the last bit."""
    return torch.full((9, 9), -INF).triu(1) + torch.arange(81.0).view(9, 9) / 10


def settle_a_mask(fabric: syncline.Fabric, policy: str) -> tuple[int, Tensor]:
    """The calls of every time after the first, more than where there is no mask."""
    calls = []
    for mask in (torch.zeros(9, 9), a_mask()):
        settled = SettledBuffers()
        settled.settle(fabric, policy, {"mask": mask}, 0)
        before = fabric.transport.call_count
        for _ in range(5):
            settled.settle(fabric, policy, {"mask": mask}, 0)
        calls.append(fabric.transport.call_count - before)
    return calls[1] - calls[0], mask


@pytest.mark.parametrize("policy", POLICIES)
def test_a_mask_of_minus_infinity_costs_no_message_and_keeps_its_bits(policy: str) -> None:
    for more, mask in syncline.run(partial(settle_a_mask, policy=policy), 7, "threads", DEADLINES):
        assert more == 0
        assert same_bits(mask, a_mask())


def settle_what_recovers(fabric: syncline.Fabric, policy: str) -> list[Tensor]:
    """It is finite nowhere, then everywhere, then not on rank 0."""
    settled, found = SettledBuffers(), []
    for bad in (range(3), [], [0]):
        buffers = {"mean": torch.full((2,), NAN if fabric.rank in bad else 7.0)}
        settled.settle(fabric, policy, buffers, 0)
        found.append(buffers["mean"])
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_buffer_that_was_finite_nowhere_may_recover(policy: str) -> None:
    for lost, recovered, saved in syncline.run(partial(settle_what_recovers, policy=policy), 3, "threads", DEADLINES):
        assert lost.isnan().all()
        assert same_bits(recovered, torch.full((2,), 7.0))
        assert same_bits(saved, torch.full((2,), 7.0))


def settle_complex(fabric: syncline.Fabric, policy: str) -> Tensor:
    buffers = {"phase": torch.tensor([1j, 2.0]) * (fabric.rank + 1)}
    SettledBuffers().settle(fabric, policy, buffers, 0)
    return buffers["phase"]


@pytest.mark.parametrize(
    ("policy", "factors"), [("broadcast", [1, 1, 1]), ("average", [2, 2, 2]), ("local", [1, 2, 3])]
)
def test_complex_buffers_are_pairs_of_real_numbers(policy: str, factors: list[int]) -> None:
    found = syncline.run(partial(settle_complex, policy=policy), 3, "threads", DEADLINES)
    for phase, factor in zip(found, factors, strict=True):
        assert torch.equal(phase, torch.tensor([1j, 2.0]) * factor)


# In training

MODES = (
    "sync",
    "delayed",
    "local:every=3",
    "local:every=3,within_hosts=true",
    "slowmo:every=3",
    "diloco:every=4,fragments=2,delay=1",
)


def train_with_a_bad_batch(fabric: syncline.Fabric, mode: str, policy: str, victim: int) -> nn.Module:
    """A batch of one rank is NaN, which skips a step, but not what a normalization keeps of it."""
    model = fill(normalized(), seed=fabric.rank)
    optimizer = PLAIN(model.parameters())
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, buffers=policy)
    for step in range(12):
        optimizer.zero_grad()
        batch = Batch(fabric.rank, step)
        if step == 4 and fabric.rank == victim:
            batch.x.fill_(NAN)
        squared(model, batch).backward()
        optimizer.step()
    sync.drain()
    sync.close()
    return model


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_batch_does_not_spoil_what_a_normalization_has_seen(mode: str, policy: str, victim: int) -> None:
    work = partial(train_with_a_bad_batch, mode=mode, policy=policy, victim=victim)
    setup = Threads(host_sizes=[2, 2]) if "within_hosts" in mode else "threads"
    for model in syncline.run(work, 4, setup, DEADLINES):
        assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
