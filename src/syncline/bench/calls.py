"""How a call is timed, the same for every contender.

An iteration writes the input anew and calls; a repeat is as many iterations as fill a tenth of a second. What is
reported is the time of an iteration less the time of the writing alone, measured on the same memory when nobody else
touches it: so whatever a contender makes the next write more expensive by (lines that a peer's cache now owns) is
charged to it. Answers are checked against the closed form before the first repeat, and a sample of them after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
REPEAT_S = 0.1
MOST_ITERATIONS = 2000
LEAST_ITERATIONS = 3
SAMPLE = 61  # every so many elements are checked after a repeat


@dataclass(frozen=True)
class AllReduce:
    """One rank's way to do what is measured, on one buffer."""

    buffer: Array
    rank: int
    world: int
    call: Callable[[], object]  # sums the buffer over ranks, in place
    barrier: Callable[[], None]
    exact: bool = True  # False where nothing is summed: the machine's limit


def measure(contender: AllReduce, repeats: int) -> list[float]:
    """Seconds per call, one figure for each repeat."""
    inputs = [pattern(contender.buffer.size, contender.rank, turn) for turn in (0, 1)]
    check(contender, inputs, turns=2)
    iterations = agree_on_iterations(contender, inputs)
    seconds = []
    for _ in range(repeats):
        writing = time_writing(contender, inputs, iterations)
        contender.barrier()
        started = time.perf_counter()
        for turn in range(iterations):
            np.copyto(contender.buffer, inputs[turn % 2])
            contender.call()
        total = time.perf_counter() - started
        verify(contender, (iterations - 1) % 2, stride=SAMPLE)
        contender.barrier()
        seconds.append((total - writing) / iterations)
    return seconds


def time_writing(contender: AllReduce, inputs: list[Array], iterations: int) -> float:
    """The writing alone. The first write takes the memory back from the caches of others and is not counted."""
    np.copyto(contender.buffer, inputs[0])
    started = time.perf_counter()
    for turn in range(iterations):
        np.copyto(contender.buffer, inputs[turn % 2])
    return time.perf_counter() - started


def agree_on_iterations(contender: AllReduce, inputs: list[Array]) -> int:
    """How many iterations fill a repeat, by the clock of rank 0."""
    for _ in range(2):
        started = time.perf_counter()
        for turn in range(LEAST_ITERATIONS):
            np.copyto(contender.buffer, inputs[turn % 2])
            contender.call()
        took = (time.perf_counter() - started) / LEAST_ITERATIONS
    wanted = min(max(int(REPEAT_S / took), LEAST_ITERATIONS), MOST_ITERATIONS)
    if not contender.exact:
        return LEAST_ITERATIONS if contender.buffer.size > 1_000_000 else 50
    contender.barrier()
    contender.buffer[:] = wanted if contender.rank == 0 else 0
    contender.call()
    return int(contender.buffer[0])


# Small whole numbers, so that every order of additions gives the exact sum.


def pattern(numel: int, rank: int, turn: int) -> Array:
    """Element i is (i % 97) + rank + 3 * turn."""
    period = np.arange(97, dtype=np.float32) + (rank + 3 * turn)
    return np.tile(period, numel // 97 + 1)[:numel]


def check(contender: AllReduce, inputs: list[Array], turns: int) -> None:
    """A few calls, each verified."""
    for turn in range(turns):
        np.copyto(contender.buffer, inputs[turn])
        contender.call()
        verify(contender, turn)
        contender.barrier()


def verify(contender: AllReduce, turn: int, stride: int = 1) -> None:
    """The closed form of the sum, for every element or every so many."""
    if not contender.exact:
        return
    world = contender.world
    exact = pattern(contender.buffer.size, 0, turn)[::stride] * world + world * (world - 1) // 2
    if not np.array_equal(contender.buffer[::stride], exact):
        raise AssertionError(f"a wrong sum of {contender.buffer.size} elements over {world} ranks")
