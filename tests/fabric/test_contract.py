"""The contract of every collective between real processes, for every fabric that starts some."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import Tensor

import syncline
from support.catalogue import ENGINES, PROCESS_FABRICS
from support.reducing import Case, rearranged, reduce_all, reduce_noise, reduce_whole_numbers, rotate, start_many
from support.references import (
    FLOATS,
    all_same_bits,
    closed_form,
    exact,
    left_fold,
    noise,
    rounding,
    same_bits,
    whole_numbers,
)
from support.starting import finds_current
from syncline.collectives.execute import OPS
from syncline.collectives.registry import ALGORITHMS
from syncline.fabric.calls import DTYPES

pytestmark = [pytest.mark.timeout(180), pytest.mark.parametrize("fabric", PROCESS_FABRICS)]
SHORT = ((torch.float32, "sum"), (torch.bfloat16, "mean"), (torch.int64, "max"))  # what short lengths are tried with
over_worlds = pytest.mark.parametrize("world", [2, 3, 5, pytest.param(4, marks=pytest.mark.slow)])


def collectives(fabric: str, world: int) -> list[str]:
    """Every algorithm, the hierarchy on two hosts, and the engine where there is one."""
    engine = ["engine"] if fabric in ENGINES else []
    return [*ALGORITHMS, f"hierarchical:sizes=1+{world - 1}", "auto", *engine]


# One life of the ranks serves all tests of a world: starting them takes longer than most calls.


@cache
def exact_results(fabric: str, world: int) -> list[tuple[Case, tuple[Tensor, ...]]]:
    """All-reduces of whole numbers: each case, and what every rank had at the end."""
    cases = [Case(*some) for some in product(collectives(fabric, world), (1009,), DTYPES, OPS)]
    short = product(collectives(fabric, world), (0, 1, world - 1, world + 1), SHORT)
    cases += [Case(collective, length, dtype, op) for collective, length, (dtype, op) in short]
    results = syncline.run(partial(reduce_all, cases=cases, reduce=reduce_whole_numbers), world, fabric)
    return list(zip(cases, zip(*results, strict=True), strict=True))


@cache
def rounded_results(fabric: str, world: int) -> list[tuple[Case, tuple[Tensor, ...]]]:
    """All-reduces of noise."""
    cases = [Case(*some) for some in product(collectives(fabric, world), (1009,), FLOATS, ("sum", "mean"))]
    results = syncline.run(partial(reduce_all, cases=cases, reduce=reduce_noise), world, fabric)
    return list(zip(cases, zip(*results, strict=True), strict=True))


@over_worlds
def test_results_are_the_closed_form_on_every_rank(fabric: str, world: int) -> None:
    for case, results in exact_results(fabric, world):
        wanted = closed_form(case.op, world, case.length, case.dtype)
        assert all(same_bits(result, wanted) for result in results), case


@over_worlds
def test_floats_have_the_same_bits_everywhere_and_are_right_to_rounding(fabric: str, world: int) -> None:
    for case, results in rounded_results(fabric, world):
        inputs = [noise(rank, case.length, case.dtype) for rank in range(world)]
        error = (results[0].double() - exact(case.op, inputs)).abs()
        assert all_same_bits(results), case
        assert bool((error <= rounding(case.op, inputs)).all()), case


@over_worlds
def test_direct_adds_in_order_of_rank_and_rounds_once(fabric: str, world: int) -> None:
    direct = [(case, results) for case, results in rounded_results(fabric, world) if case.collective == "direct"]
    assert len(direct) == len(FLOATS) * 2
    for case, results in direct:
        inputs = [noise(rank, case.length, case.dtype) for rank in range(world)]
        assert same_bits(results[0], left_fold(case.op, inputs)), case


@over_worlds
def test_collectives_that_rearrange(fabric: str, world: int) -> None:
    length, dtype = 101, torch.float32
    outcomes = syncline.run(partial(rearranged, length=length, dtype=dtype), world, fabric)
    inputs = [whole_numbers(rank, world, length, dtype) for rank in range(world)]
    parts = [whole_numbers(rank, world, length * world, dtype).view(world, length) for rank in range(world)]
    for name, op in [("reduce_scatter", "sum"), ("reduce_scatter mean", "mean"), ("reduce_scatter max", "max")]:
        assert same_bits(torch.cat([outcome[name] for outcome in outcomes]), closed_form(op, world, length, dtype))
    for rank, outcome in enumerate(outcomes):
        assert same_bits(outcome["all_gather"], torch.stack(inputs))
        assert same_bits(outcome["all_to_all"], torch.cat([some[rank] for some in parts]))
        assert same_bits(outcome["all_to_all twice"], parts[rank].view(-1))
        assert same_bits(outcome["unchanged"], torch.cat([inputs[rank], parts[rank].view(-1)]))
        assert all(same_bits(outcome[f"broadcast {root}"], inputs[root]) for root in range(world))


@over_worlds
def test_messages_in_flight_together_arrive_in_the_order_of_posting(fabric: str, world: int) -> None:
    for rank, arrived in enumerate(syncline.run(partial(rotate, count=4, length=1000), world, fabric)):
        left = (rank - 1) % world
        assert [tensor.tolist() for tensor in arrived] == [[10.0 * left + i] * 1000 for i in range(4)]


@over_worlds
def test_calls_take_effect_in_the_order_in_which_they_were_started(fabric: str, world: int) -> None:
    lengths = (1000, 0, 1, 317)
    wanted = [closed_form("sum", world, length, torch.float32) for length in lengths]
    for results in syncline.run(partial(start_many, lengths=lengths), world, fabric):
        assert all(map(same_bits, results, wanted))


def test_inside_run_the_fabric_is_the_current_one(fabric: str) -> None:
    assert syncline.run(finds_current, 3, fabric) == [True] * 3


def test_a_world_of_one_works(fabric: str) -> None:
    cases = [Case(*some) for some in product([*ALGORITHMS, "auto"], (0, 1, 100), DTYPES, OPS)]
    (results,) = syncline.run(partial(reduce_all, cases=cases, reduce=reduce_whole_numbers), 1, fabric)
    for case, result in zip(cases, results, strict=True):
        assert same_bits(result, whole_numbers(0, 1, case.length, case.dtype)), case
