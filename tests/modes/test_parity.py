"""Every mode, with every loop that a user may write, comes to what plain torch does in one process, or refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import pytest

import syncline
from support.catalogue import PROCESS_FABRICS, one_now_others_slow
from support.on_a_line import Turns
from support.parity import CASES, MODES, Refused, Wrong, simulated, train, train_all
from support.runs import DEADLINES, Result
from support.weights import assert_close, assert_replicas
from syncline.errors import ConfigError, Desync, RankFailed

HASTY = syncline.Deadlines(2.0, join=60.0)  # of what fails anyway
REFUSALS = (ConfigError, Desync)
OF_PROCESSES = tuple(mode for mode in MODES if mode != "async")  # whose order nobody can tell


def expectation(name: str, mode: str) -> Refused | Wrong | None:
    return CASES[name].but.get(mode.partition(",")[0])


def cells() -> list:
    """Every case in every mode; where ranks come to the reference, in worlds of all sizes."""
    found = []
    for mode, (_, worlds, *_) in MODES.items():
        for name in CASES:
            expected = expectation(name, mode)
            marks = ()
            if isinstance(expected, Wrong):
                marks = pytest.mark.xfail(strict=True, raises=expected.fails_with, reason=expected.row)
                worlds_here = (expected.world or worlds[0],)
            else:
                worlds_here = worlds if expected is None else worlds[:1]
            for world in worlds_here:
                found.append(pytest.param(name, mode, world, marks=marks, id=f"{mode}-{name}-{world}"))
    return found


def on_threads(name: str, mode: str, world: int) -> list[Result]:
    turns = Turns(world) if mode == "async" else None
    expected = expectation(name, mode)
    fails = isinstance(expected, Wrong) and expected.fails_with is RankFailed
    return syncline.run(
        partial(train, name=name, mode=mode, turns=turns), world, "threads", HASTY if fails else DEADLINES
    )


def assert_as_simulated(name: str, mode: str, ranks: Sequence[Result]) -> None:
    """Parameters, and what the loop has noted; where ranks are in step, they have the same bits."""
    if MODES[mode].alike:
        assert_replicas([replace(one, noted=[]) for one in ranks])
    expected = simulated(name, mode, len(ranks))
    for one, wanted in zip(ranks[: len(expected)], expected, strict=True):  # servers are the last ranks
        assert_close(one.parameters, wanted.parameters, CASES[name].tolerance)
        assert one.noted == wanted.noted


def first_error(failed: RankFailed) -> BaseException:
    return next(iter(failed.failures.values()))


@pytest.mark.parametrize(("name", "mode", "world"), cells())
def test_every_mode_does_what_plain_torch_does_or_refuses(name: str, mode: str, world: int) -> None:
    expected = expectation(name, mode)
    only = expected if isinstance(expected, Refused) else expected.only if isinstance(expected, Wrong) else None
    try:
        ranks = on_threads(name, mode, world)
    except RankFailed as failed:
        error = first_error(failed)
        if only is not None and isinstance(error, only.kind) and re.search(only.says, str(error)):
            return
        if isinstance(expected, Wrong) and only is None and isinstance(error, REFUSALS):
            return  # that is as right as the right answer
        raise
    assert only is None, f"nobody refused, though the only right answer is {only}"
    assert_as_simulated(name, mode, ranks)


@cache
def in_processes(fabric: str) -> list[dict[tuple[str, str], Result]] | RankFailed:
    """All cases that come to the reference in one life of each rank, or how that failed."""
    pairs = [(name, mode) for mode in OF_PROCESSES for name in CASES if expectation(name, mode) is None]
    try:
        return syncline.run(partial(train_all, pairs=pairs), 2, fabric, DEADLINES)
    except RankFailed as error:
        return error


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("parity in processes")  # which run once
@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS[::-1]))
@pytest.mark.parametrize("mode", OF_PROCESSES)
def test_every_mode_does_on_every_fabric_what_plain_torch_does(mode: str, fabric: str) -> None:
    ranks = in_processes(fabric)
    if isinstance(ranks, RankFailed):
        raise ranks
    for name in CASES:
        if expectation(name, mode) is None:
            assert_as_simulated(name, mode, [results[name, mode] for results in ranks])
