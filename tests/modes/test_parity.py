"""Every mode, with every loop that a user may write, comes to what plain torch does in one process, or refuses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import pytest

import syncline
from support.catalogue import PROCESS_FABRICS
from support.on_a_line import Turns
from support.parity import (
    CASES,
    MODES,
    Refused,
    Wrong,
    assert_as_simulated,
    assert_nobody_had_to_refuse,
    expectation,
    is_right,
    train,
    train_all,
)
from support.runs import DEADLINES, Result
from syncline.errors import RankFailed, SynclineError

OF_PROCESSES = tuple(mode for mode in MODES if mode != "async")  # of which nobody knows the order


def marks_of(expected: Refused | Wrong | None) -> tuple:
    if not isinstance(expected, Wrong):
        return ()
    return (pytest.mark.xfail(strict=True, raises=AssertionError, reason=expected.row),)


def worlds_of(mode: str, expected: Refused | Wrong | None) -> tuple[int, ...]:
    """All sizes, where ranks come to the reference."""
    worlds = MODES[mode].worlds
    if expected is None:
        return worlds
    return (expected.world if isinstance(expected, Wrong) and expected.world else worlds[0],)


def cells() -> Iterator:
    """`make test` leaves out two thirds of the larger worlds."""
    for mode in MODES:
        for number, name in enumerate(CASES):
            expected = expectation(name, mode)
            first, *larger = worlds_of(mode, expected)
            yield pytest.param(name, mode, first, marks=marks_of(expected), id=f"{mode}-{name}-{first}")
            for world in larger:
                marks = pytest.mark.slow if (number + world) % 3 else ()
                yield pytest.param(name, mode, world, marks=marks, id=f"{mode}-{name}-{world}")


@pytest.mark.parametrize(("name", "mode", "world"), list(cells()))
def test_every_mode_does_what_plain_torch_does_or_refuses(name: str, mode: str, world: int) -> None:
    expected = expectation(name, mode)
    work = partial(train, name=name, mode=mode, turns=Turns(world) if mode == "async" else None)
    try:
        ranks = syncline.run(work, world, "threads", DEADLINES)
    except RankFailed as failed:
        if is_right(expected, next(iter(failed.failures.values()))):
            return
        raise
    assert_nobody_had_to_refuse(expected)
    assert_as_simulated(name, mode, ranks)


# On every fabric


def cells_of_processes() -> Iterator:
    """Without what is refused."""
    for fabric in PROCESS_FABRICS:
        for name, mode in in_one_life():
            marks = [*marks_of(expectation(name, mode)), pytest.mark.xdist_group(f"parity on {fabric}")]
            yield pytest.param(name, mode, fabric, marks=marks, id=f"{mode}-{name}-{fabric}")


def in_one_life() -> list[tuple[str, str]]:
    cells = [(name, mode, expectation(name, mode)) for mode in OF_PROCESSES for name in CASES]
    return [(name, mode) for name, mode, expected in cells if not isinstance(expected, Refused)]


@cache
def in_processes(fabric: str) -> list[dict[tuple[str, str], Result | SynclineError]] | RankFailed:
    """All cases in one life of each rank, or how that failed."""
    try:
        return syncline.run(partial(train_all, pairs=in_one_life()), 2, fabric, DEADLINES)
    except RankFailed as error:
        return error


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "mode", "fabric"), list(cells_of_processes()))
def test_every_fabric_does_what_plain_torch_does(name: str, mode: str, fabric: str) -> None:
    lives = in_processes(fabric)
    if isinstance(lives, RankFailed):
        raise lives
    ranks = [results[name, mode] for results in lives]
    if all(isinstance(one, SynclineError) and is_right(expectation(name, mode), one) for one in ranks):
        return
    assert_as_simulated(name, mode, ranks)
