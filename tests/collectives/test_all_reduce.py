"""All-reduce on threads, with every algorithm."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import syncline
from support.reducing import Case, cut_finely, reduce_noise, reduce_whole_numbers
from support.references import (
    FLOATS,
    HALVES,
    all_same_bits,
    closed_form,
    exact,
    left_fold,
    noise,
    rounding,
    same_bits,
    whole_numbers,
)
from support.tried import EVERY_ONE, SHAPES, cases, on_threads
from syncline.collectives.direct import Direct
from syncline.collectives.execute import OPS
from syncline.collectives.hierarchical import Hierarchical
from syncline.collectives.registry import ALGORITHMS, cheapest
from syncline.collectives.ring import Ring
from syncline.collectives.tree import Tree
from syncline.core.group import Group
from syncline.errors import Desync, FabricError
from syncline.fabric.calls import DTYPES
from syncline.fabric.threads import ThreadGroup
from syncline.launch.threads import run_threads

# All-reduce


@pytest.mark.parametrize("collective", EVERY_ONE)
def test_results_are_the_closed_form_on_every_rank(collective: str) -> None:
    @settings(max_examples=20)
    @given(cases(collective))
    def law(world_and_case: tuple[int, Case]) -> None:
        world, case = world_and_case
        for result in on_threads(partial(reduce_whole_numbers, case=case), world):
            assert same_bits(result, closed_form(case.op, world, case.length, case.dtype))

    law()


@pytest.mark.parametrize("collective", EVERY_ONE)
def test_floats_have_the_same_bits_everywhere_and_are_right_to_rounding(collective: str) -> None:
    @settings(max_examples=20)
    @given(cases(collective, FLOATS), st.integers(0, 1000))
    def law(world_and_case: tuple[int, Case], seed: int) -> None:
        world, case = world_and_case
        inputs = [noise(rank, case.length, case.dtype, seed) for rank in range(world)]
        results = on_threads(partial(reduce_noise, case=case, seed=seed), world)
        assert all_same_bits(results)
        error = (results[0].double() - exact(case.op, inputs)).abs()
        assert bool((error <= rounding(case.op, inputs)).all())

    law()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_direct_adds_in_order_of_rank_and_rounds_once(world: int, dtype: torch.dtype, op: str) -> None:
    inputs = [noise(rank, 1009, dtype) for rank in range(world)]
    for result in on_threads(partial(reduce_noise, case=Case("direct", 1009, dtype, op)), world):
        assert same_bits(result, left_fold(op, inputs))


def test_the_order_of_additions_would_show() -> None:
    # The test above means something only if another order gives other bits.
    inputs = [noise(rank, 1009, torch.float32) for rank in range(3)]
    assert not same_bits(left_fold("sum", inputs), left_fold("sum", inputs[::-1]))


@pytest.mark.parametrize("collective", EVERY_ONE)
def test_a_mean_is_the_sum_divided(collective: str) -> None:
    def sum_and_mean(fabric: syncline.Fabric) -> tuple[Tensor, Tensor]:
        cut_finely(fabric)
        x = noise(fabric.rank, 1000, torch.float32)
        total = fabric.all_reduce(x.clone(), op="sum", collective=collective)
        return total, fabric.all_reduce(x, op="mean", collective=collective)

    for total, mean in on_threads(sum_and_mean, 7):
        assert same_bits(mean, total / 7)


@pytest.mark.parametrize("collective", EVERY_ONE)
def test_a_mean_in_fp16_does_not_overflow_on_the_way(collective: str) -> None:
    def mean(fabric: syncline.Fabric) -> Tensor:
        return fabric.all_reduce(torch.full((100,), 20_000.0, dtype=torch.float16), op="mean", collective=collective)

    for result in on_threads(mean, 8):
        assert same_bits(result, torch.full((100,), 20_000.0, dtype=torch.float16))


@pytest.mark.parametrize("collective", EVERY_ONE)
@pytest.mark.parametrize("dtype", HALVES)
def test_small_contributions_are_not_lost_beside_large_ones_in_16_bits(collective: str, dtype: torch.dtype) -> None:
    # 1 + 15 * 2**-12 is a quarter of a step of fp16 away from a multiple of it; one at a time they would all vanish.
    small = torch.finfo(dtype).eps / 4

    def total(fabric: syncline.Fabric) -> Tensor:
        x = torch.full((50,), 1.0 if fabric.rank == 0 else small, dtype=dtype)
        return fabric.all_reduce(x, collective=collective)

    for result in on_threads(total, 13):
        assert same_bits(result, torch.full((50,), 1.0 + 3 * torch.finfo(dtype).eps, dtype=dtype))


@pytest.mark.parametrize("collective", EVERY_ONE)
def test_integers_are_divided_towards_zero(collective: str) -> None:
    def mean(fabric: syncline.Fabric) -> Tensor:
        i = torch.arange(-50, 50)
        return fabric.all_reduce(i + (i.sign() * (fabric.rank == 0)), op="mean", collective=collective)

    for result in on_threads(mean, 3):
        assert result.tolist() == list(range(-50, 50))


@pytest.mark.parametrize("collective", EVERY_ONE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_maximum_is_nan_where_any_rank_has_nan(collective: str, dtype: torch.dtype) -> None:
    def maximum(fabric: syncline.Fabric) -> Tensor:
        x = noise(fabric.rank, 100, dtype)
        x[fabric.rank] = torch.nan
        return fabric.all_reduce(x, op="max", collective=collective)

    results = on_threads(maximum, 5)
    assert all_same_bits(results)
    assert results[0].isnan().tolist() == [position < 5 for position in range(100)]


@pytest.mark.parametrize("collective", EVERY_ONE)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_what_is_not_finite_spreads_to_every_rank(collective: str, op: str) -> None:
    def total(fabric: syncline.Fabric) -> Tensor:
        x = noise(fabric.rank, 100, torch.float32)
        x[0] = torch.inf if fabric.rank == 2 else 0.0
        x[1] = torch.inf if fabric.rank == 2 else -torch.inf
        return fabric.all_reduce(x, op=op, collective=collective)

    for result in on_threads(total, 5):
        assert result[0] == torch.inf
        assert result[1].isnan()
        assert bool(result[2:].isfinite().all())


@pytest.mark.parametrize("collective", EVERY_ONE)
def test_a_world_of_one_leaves_every_bit(collective: str) -> None:
    inputs = [torch.tensor([-3, 0, 7], dtype=dtype) for dtype in DTYPES]
    inputs += [torch.tensor([-0.0, -torch.inf, torch.finfo(dtype).tiny], dtype=dtype) for dtype in FLOATS]

    def reduce(fabric: syncline.Fabric) -> list[list[Tensor]]:
        return [[fabric.all_reduce(x.clone(), op=op, collective=collective) for x in inputs] for op in OPS]

    (results,) = on_threads(reduce, 1)
    for of_op in results:
        assert all(map(same_bits, of_op, inputs))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_of_any_shape_is_reduced_in_place(shape: str, dtype: torch.dtype) -> None:
    def reduce(fabric: syncline.Fabric) -> list[tuple[Tensor, bool]]:
        cut_finely(fabric)
        return [reduced_in_place(fabric, collective) for collective in EVERY_ONE]

    def reduced_in_place(fabric: syncline.Fabric, collective: str) -> tuple[Tensor, bool]:
        x = SHAPES[shape](whole_numbers(fabric.rank, 4, 300, dtype))
        before = x.data_ptr(), x.stride(), x.requires_grad, x.is_leaf
        result = fabric.all_reduce(x, collective=collective)
        return result, result is x and before == (x.data_ptr(), x.stride(), x.requires_grad, x.is_leaf)

    wanted = sum(SHAPES[shape](whole_numbers(rank, 4, 300, dtype)).detach().double() for rank in range(4))
    for results in on_threads(reduce, 4):
        assert all(in_place for _, in_place in results)
        assert all(same_bits(result, wanted.to(dtype)) for result, _ in results)


def test_the_gap_between_strided_elements_is_not_touched() -> None:
    def reduce(fabric: syncline.Fabric) -> Tensor:
        pairs = torch.full((100, 2), float(fabric.rank))
        fabric.all_reduce(pairs[:, 0])
        return pairs[:, 1]

    for rank, gap in enumerate(on_threads(reduce, 3)):
        assert gap.tolist() == [float(rank)] * 100


@pytest.mark.parametrize("world", [2, 3, 8])
def test_what_lies_around_the_tensor_is_not_touched(world: int) -> None:
    def reduce(fabric: syncline.Fabric) -> Tensor:
        cut_finely(fabric)
        larger = torch.full((300,), float(fabric.rank))
        for collective in ALGORITHMS:
            fabric.all_reduce(larger[100:200], collective=collective)
        return torch.cat([larger[:100], larger[200:]])

    for rank, around in enumerate(on_threads(reduce, world)):
        assert around.tolist() == [float(rank)] * 200


def test_hosts_need_not_hold_neighbouring_ranks() -> None:
    group = ThreadGroup(Group.on_hosts([0, 2, 2, 1, 2, 0]), (), syncline.Deadlines())
    for result in run_threads(partial(reduce_noise, case=Case("hierarchical", 500, torch.float32, "sum")), group):
        inputs = [noise(rank, 500, torch.float32) for rank in range(6)]
        assert bool(((result.double() - exact("sum", inputs)).abs() <= rounding("sum", inputs)).all())


@pytest.mark.parametrize(
    "settings_and_text",
    [
        (Ring(), "ring"),
        (Direct(), "direct"),
        (Tree(arity=3), "tree:3"),
        (Tree(), "tree:arity=2"),
        (Hierarchical(inner="ring", sizes="2+2"), "hierarchical:inner=ring,sizes=2+2"),
        (Hierarchical(inner="tree:arity=3,pieces=2"), Hierarchical(inner="tree:arity=3,pieces=2")),
    ],
    ids=lambda pair: str(pair[1]),
)
def test_an_object_and_its_text_are_the_same_call(settings_and_text) -> None:
    def reduce(fabric: syncline.Fabric) -> Tensor:
        return fabric.all_reduce(torch.ones(100), collective=settings_and_text[fabric.rank % 2])

    for result in syncline.run(reduce, ranks=4, fabric="threads"):
        assert result.tolist() == [4.0] * 100


def test_many_calls_of_different_sizes_do_not_mix() -> None:
    def reduce(fabric: syncline.Fabric) -> list[Tensor]:
        cut_finely(fabric)
        return [
            fabric.all_reduce(whole_numbers(fabric.rank, 4, length, torch.int64), collective=collective)
            for length in range(0, 60, 7)
            for collective in ALGORITHMS
        ]

    wanted = [closed_form("sum", 4, length, torch.int64) for length in range(0, 60, 7) for _ in ALGORITHMS]
    for results in on_threads(reduce, 4):
        assert all(map(same_bits, results, wanted))


@pytest.mark.parametrize("ahead", [True, False])
def test_two_segments_are_sent_at_once_and_five_are_asked_for_ahead(ahead: bool) -> None:
    def most_in_flight(fabric: syncline.Fabric) -> tuple[int, int]:
        cut_finely(fabric)
        fabric.transport.receives_ahead = ahead
        counted = CountsFlights(fabric)
        summed = fabric.all_reduce(torch.ones(2000), collective="ring")
        assert torch.equal(summed, torch.full((2000,), 4.0))
        return counted.most_sends, counted.most_receives

    assert on_threads(most_in_flight, 4) == [(2, 5 if ahead else 2)] * 4


class CountsFlights:
    """Stands between the executor and a transport's `post`."""

    def __init__(self, fabric: syncline.Fabric) -> None:
        self.original = fabric.transport.post
        self.sends = self.receives = self.most_sends = self.most_receives = 0
        fabric.transport.post = self.post

    def post(self, sends, receives):
        pending = self.original(sends, receives)
        if any(tensor.dtype == torch.uint8 for tensor, _ in [*sends, *receives]):  # the agreement
            return pending
        self.count(len(sends), len(receives))
        original_wait = pending.wait

        def wait(deadline_s: float | None = None) -> None:
            original_wait(deadline_s)
            self.count(-len(sends), -len(receives))

        pending.wait = wait
        return pending

    def count(self, sends: int, receives: int) -> None:
        self.sends += sends
        self.receives += receives
        self.most_sends = max(self.most_sends, self.sends)
        self.most_receives = max(self.most_receives, self.receives)


# Asynchronous calls


@pytest.mark.parametrize("collective", EVERY_ONE)
def test_calls_take_effect_in_the_order_in_which_they_were_started(collective: str) -> None:
    def start_and_wait(fabric: syncline.Fabric) -> tuple[list[Tensor], list[bool]]:
        cut_finely(fabric)
        inputs = [whole_numbers(fabric.rank, 4, length, torch.float32) for length in (100, 0, 1, 317)]
        handles = [fabric.all_reduce_async(x, collective=collective) for x in inputs]
        handles += [fabric.all_reduce_async(inputs[0], op="max", collective=collective)]
        behind = fabric.all_reduce(whole_numbers(fabric.rank, 4, 50, torch.float32), collective=collective)
        for handle in reversed(handles):
            handle.wait()
        return [*inputs, behind], [handle.done() for handle in handles]

    wanted = [closed_form("sum", 4, length, torch.float32) for length in (100, 0, 1, 317, 50)]
    for results, done in on_threads(start_and_wait, 4):
        assert all(map(same_bits, results, wanted))
        assert all(done)


def test_an_asynchronous_call_returns_at_once_and_can_be_awaited_for_a_while() -> None:
    everyone_came = threading.Event()

    def wait_a_while(fabric: syncline.Fabric) -> Tensor:
        if fabric.rank == 1:
            everyone_came.wait(5.0)
            return fabric.all_reduce(torch.tensor([1.0]))
        x = torch.tensor([1.0])
        handle = fabric.all_reduce_async(x)
        assert not handle.done()
        with pytest.raises(FabricError, match=r"all_reduce\(sum, float32\[1\], .*not done after 0.05 s"):
            handle.wait(0.05)
        everyone_came.set()
        handle.wait()
        return x

    assert [result.item() for result in syncline.run(wait_a_while, ranks=2, fabric="threads")] == [2.0, 2.0]


def test_what_an_asynchronous_call_raises_is_raised_by_its_handle() -> None:
    def differ(fabric: syncline.Fabric) -> None:
        handle = fabric.all_reduce_async(torch.ones(1 + fabric.rank))
        with pytest.raises(Desync):
            handle.wait()

    syncline.run(differ, ranks=2, fabric="threads")


# Choosing


@pytest.mark.parametrize("nbytes", [4, 1 << 12, 1 << 20])
def test_auto_is_the_cheapest_for_this_fabric(nbytes: int) -> None:
    def during(fabric: syncline.Fabric) -> tuple[str, str]:
        fabric.all_reduce(torch.ones(nbytes // 4))
        transport = fabric.transport
        chosen = cheapest(nbytes, fabric.world, fabric.hosts, transport.latency_s, transport.bytes_per_s)
        return transport.during, chosen

    for called, chosen in on_threads(during, 8):
        assert called.endswith(f", {chosen})")
