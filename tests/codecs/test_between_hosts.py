"""Codecs between hosts only: the mean over all ranks, the same bits everywhere, and nothing lost on the way."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import syncline
from support import crossing
from support.catalogue import one_now_others_slow
from support.crossing import RATES, Moved, slopes_of
from support.patience import within
from support.striking import be_killed
from syncline import Deadlines
from syncline.codecs.registry import codec_of
from syncline.errors import RankFailed
from syncline.fabric.threads import Dies, Threads

SIZES = ([2, 3], [1, 4], [2, 2])
FED_BACK = ("fp16:feedback=true", "int8", "int4:rounding=stochastic", "onebit", "topk:0.1", "topk:0.1,values=int8")
FED_BACK += ("topk:0.2,select=sampled", "randomk:0.1", "powersgd:2", "rules:codec=(topk:0.1),below=100")
EVERY_CODEC = (*FED_BACK, "fp16", "bf16", "int8:feedback=false", "onebit:vote=true,feedback=false", "dgc:0.1,warmup=3")
EVERY_CODEC += ("randomk:0.1,scaled=true,feedback=false", "warmup:codec=(topk:0.1),steps=2")
on_hosts = pytest.mark.parametrize("sizes", one_now_others_slow(SIZES), ids=lambda sizes: "+".join(map(str, sizes)))


def move(sizes: list[int], codec: str, **how: object) -> list[Moved]:
    work = partial(crossing.move, codec=codec, collective="hierarchical", **how)
    return syncline.run(work, sum(sizes), Threads(host_sizes=sizes))


def assert_same_bits(by_rank: list[list[Tensor]]) -> None:
    for other in by_rank[1:]:
        assert all(torch.equal(a, b) for a, b in zip(by_rank[0], other, strict=True))


def dense(world: int, skipped: int = -1) -> list[Tensor]:
    """How far parameters go without any codec."""
    total = [torch.zeros(slope.numel(), dtype=torch.float64) for slope in slopes_of(0, 0)]
    for step, rate in enumerate(RATES):
        for rank in range(world) if step != skipped else ():
            for sum_, slope in zip(total, slopes_of(step, rank), strict=True):
                sum_ += rate * slope.flatten().double() / world
    return total


# Answers


@pytest.mark.sampled(3)
@on_hosts
@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_all_ranks_end_with_the_same_bits(codec: str, sizes: list[int]) -> None:
    assert_same_bits([found.moved for found in move(sizes, codec)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", [*SIZES, [3], [1, 1, 1], [1, 2, 4]], ids=str)
@pytest.mark.parametrize(("codec", "error"), [("none", 1e-6), ("topk:1.0", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2)])
def test_it_is_the_mean_over_ranks_whatever_the_sizes_of_hosts(codec: str, error: float, sizes: list[int]) -> None:
    by_rank = move(sizes, codec)
    assert_same_bits([found.moved for found in by_rank])
    for found, exact in zip(by_rank[0].moved, dense(sum(sizes)), strict=True):
        assert (found.double() - exact).norm() <= error * exact.norm()


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_leaders_say_what_ranks_would_that_have_the_means_of_hosts(codec: str) -> None:
    """Two hosts of two ranks are two ranks, bit for bit: weights are powers of two.

    With feedback in the first step only: what was kept is added before the sum of the host is made, not after.
    """
    until = 1 if codec_of(codec).feedback else len(RATES)
    on_two_hosts = move([2, 2], codec, until=until)
    work = partial(crossing.move, codec=codec, collective="auto", of_hosts=2, until=until)
    alone = syncline.run(work, 2, "threads")
    assert_same_bits([on_two_hosts[0].moved, alone[0].moved])
    for leader, one in zip(on_two_hosts[::2], alone, strict=True):
        assert all(torch.equal(a, 2 * b) for a, b in zip(leader.kept, one.kept, strict=True))
        assert leader.said == one.said > 0


@on_hosts
def test_only_leaders_talk_and_keep(sizes: list[int]) -> None:
    leaders = {0, sizes[0]}
    for rank, found in enumerate(move(sizes, "powersgd:2")):
        assert (found.said > 0) == (rank in leaders)
        assert any(kept.any() for kept in found.kept) == (rank in leaders)
        assert bool(found.state) == (rank in leaders)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_other_types_are_added_up_in_float32(dtype: torch.dtype) -> None:
    by_rank = move([2, 3], "topk:1.0", dtype=dtype)
    assert_same_bits([found.moved for found in by_rank])
    error = 2e-2 if dtype == torch.bfloat16 else 1e-6
    for found, exact in zip(by_rank[0].moved, dense(5), strict=True):
        assert (found.double() - exact).norm() <= error * exact.norm()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", one_now_others_slow(["shm", "torch"]))
def test_every_fabric_comes_to_the_same(fabric: str) -> None:
    collective = "hierarchical:sizes=1+3"
    codecs = ("fp16", "int8", "topk:0.1", "powersgd:2")
    work = partial(crossing.move_with_all, codecs=codecs, collective=collective)
    by_rank = syncline.run(work, 4, fabric, Deadlines(20.0))
    threads = syncline.run(work, 4, "threads")
    for number, codec in enumerate(codecs):
        assert_same_bits([found[number] for found in by_rank])
        for one, other in zip(by_rank[0][number], threads[0][number], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=codec)


@pytest.mark.parametrize("collective", ["hierarchical:inner=ring,outer=tree", "hierarchical:sizes=3+2"])
def test_settings_of_the_collective_are_followed(collective: str) -> None:
    work = partial(crossing.move, codec="topk:1.0", collective=collective)
    by_rank = syncline.run(work, 5, Threads(host_sizes=[2, 3]))
    assert [rank for rank, found in enumerate(by_rank) if found.said] == ([0, 3] if "3+2" in collective else [0, 2])
    for found, exact in zip(by_rank[4].moved, dense(5), strict=True):
        assert (found.double() - exact).norm() <= 1e-6 * exact.norm()


# What is kept


def assert_nothing_is_lost(by_rank: list[Moved], exact: list[Tensor]) -> None:
    """The mean over ranks of what is kept is what is missing."""
    for number, wanted in enumerate(exact):
        kept = torch.stack([found.kept[number].double() for found in by_rank]).mean(0)
        missing = wanted - by_rank[0].moved[number].double()
        assert (kept - missing).norm() <= 2e-5 * (1 + wanted.norm())


@pytest.mark.sampled(4)
@on_hosts
@pytest.mark.parametrize("skipped", [-1, 3])
@pytest.mark.parametrize("codec", FED_BACK)
def test_sent_plus_kept_is_the_gradient(codec: str, skipped: int, sizes: list[int]) -> None:
    by_rank = move(sizes, codec, skipped=skipped)
    assert_same_bits([found.moved for found in by_rank])
    assert_nothing_is_lost(by_rank, dense(sum(sizes), skipped))


@pytest.mark.sampled(4)
@on_hosts
@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_resuming_gives_the_run_that_was_not_interrupted_bit_for_bit(codec: str, sizes: list[int]) -> None:
    whole = move(sizes, codec)
    for one, other in zip(whole, move(sizes, codec, interrupted=4), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.moved, other.moved, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one.kept, other.kept, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("sizes", "collective"), [([1, 4], "hierarchical"), ([3, 2], "hierarchical"), ([5], "auto")])
@pytest.mark.parametrize("codec", ["topk:0.1", "powersgd:2", "int8"])
def test_nothing_is_lost_when_hosts_are_other_ones_after_resuming(
    codec: str, sizes: list[int], collective: str
) -> None:
    """Each rank goes on from its own state."""
    first = syncline.run(
        partial(crossing.move, codec=codec, collective="hierarchical", until=4), 5, Threads(host_sizes=[2, 3])
    )
    work = partial(crossing.move, codec=codec, collective=collective, since=[found.saved for found in first])
    by_rank = syncline.run(work, 5, Threads(host_sizes=sizes))
    assert_same_bits([found.moved for found in by_rank])
    assert_nothing_is_lost(by_rank, dense(5))


def test_with_another_number_of_ranks_the_mean_of_what_was_kept_goes_on() -> None:
    states = [found.saved[1] for found in move([2, 3], "powersgd:2")]
    kept = [state["codec_state"]["residual"]["matrix"] for state in states]
    for taken in syncline.run(partial(crossing.take, codec="powersgd:2", states=states), 4, Threads(host_sizes=[2, 2])):
        torch.testing.assert_close(taken["residual"]["matrix"], torch.stack(kept).mean(0))
        assert torch.equal(taken["state"]["matrix/factor"], states[0]["codec_state"]["state"]["matrix/factor"])


def test_a_sum_that_is_infinite_is_noticed_and_skipped() -> None:
    """Each gradient is finite, but those of a host add up to more than float32 has."""
    by_rank = move([2, 3], "topk:0.1", huge=2)
    assert_same_bits([found.moved for found in by_rank])
    assert_nothing_is_lost(by_rank, dense(5, skipped=2))


def test_samples_of_quality_compare_what_was_left_with_the_sum_of_the_host() -> None:
    for rank, samples in enumerate(
        syncline.run(partial(crossing.sampled, codec="topk:0.5"), 5, Threads(host_sizes=[2, 3]))
    ):
        assert samples
        assert all((0 < error < 1) if rank in (0, 2) else error == 0 for error in samples)


# Failures and endings


@pytest.mark.parametrize("victim", [1, 2, 4])
def test_all_ranks_name_the_one_that_died(victim: int) -> None:
    started = time.monotonic()
    faults = [Dies(rank=victim, call=12), Dies(rank=victim, call=14)]
    with pytest.raises(RankFailed) as caught:
        syncline.run(
            partial(crossing.move, codec="topk:0.1", collective="hierarchical"),
            5,
            Threads(host_sizes=[2, 3], faults=faults, deadlines=Deadlines(20.0)),
        )
    assert {getattr(e, "rank", victim) for e in caught.value.failures.values()} == {victim}
    assert len(caught.value.failures) == 5
    assert time.monotonic() - started < within(5.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", ["shm", "torch"])
@pytest.mark.parametrize("victim", one_now_others_slow([3, 0, 1]))
def test_all_ranks_name_the_one_that_was_killed(fabric: str, victim: int, tmp_path: Path) -> None:
    work = partial(crossing.move_with_a_victim, victim=victim, strike=be_killed, folder=str(tmp_path))
    with pytest.raises(RankFailed, match="was ended by SIGKILL") as caught:
        syncline.run(work, 4, fabric, Deadlines(20.0))
    assert list(caught.value.failures) == [victim]
    for kind, culprit, seconds in caught.value.results.values():
        assert (kind, culprit) == ("PeerLost", victim)
        assert seconds < within(5.0)


@pytest.mark.parametrize("fabric", one_now_others_slow(["torch", "shm"]))
def test_closing_leaves_nothing_behind(fabric: str) -> None:
    assert syncline.run(crossing.make_and_close, 4, fabric, Deadlines(20.0)) == [(0, 0)] * 4


def test_every_codec_is_known() -> None:
    assert all(codec_of(codec).name for codec in EVERY_CODEC)
