"""One rank's program: exact in elements however many there are, and as much in flight as is safe."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.catalogue import COLLECTIVES, uneven_hosts
from syncline.collectives.all_gather import all_gather
from syncline.collectives.all_to_all import all_to_all
from syncline.collectives.broadcast import broadcast
from syncline.collectives.program import Piece, Program, Step, compile_program
from syncline.collectives.reduce_scatter import reduce_scatter
from syncline.collectives.registry import ALGORITHMS, schedule_of
from syncline.collectives.schedule import Schedule, boundaries, hosts_of_sizes

HUGE = 3 * 2**31  # elements; in bytes it is more than any 32-bit count holds, in any dtype


# Chunks


@given(numel=st.integers(0, 2**40), chunks=st.integers(1, 1000), grain=st.integers(1, 2**16))
def test_chunks_cover_the_buffer_once(numel: int, chunks: int, grain: int) -> None:
    bounds = boundaries(numel, chunks, grain)
    assert len(bounds) == chunks + 1
    assert (bounds[0], bounds[-1]) == (0, numel)
    assert bounds == sorted(bounds)


@given(numel=st.integers(0, 2**40), chunks=st.integers(1, 1000), grain=st.integers(1, 2**16))
def test_chunks_are_equal_but_for_the_last_and_start_at_the_grain(numel: int, chunks: int, grain: int) -> None:
    bounds = boundaries(numel, chunks, grain)
    sizes = [hi - lo for lo, hi in pairwise(bounds)]
    filled = [size for size in sizes if size]
    assert len(set(filled[:-1])) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert all(bound % grain == 0 for bound in bounds if bound != numel)
    assert sizes[0] < numel / chunks + 1 + grain


# Programs of huge buffers. Nothing is allocated: a program is arithmetic.


def schedules(world: int) -> list[Schedule]:
    """Every goal and every algorithm, on uneven hosts."""
    hosts = hosts_of_sizes(uneven_hosts(world))
    others = [all_gather(world), reduce_scatter(world), all_to_all(world), broadcast(world, world - 1)]
    return [*(schedule_of(name, world, hosts) for name in COLLECTIVES), *others]


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_pieces_tile_the_chunks_of_each_transfer(world: int) -> None:
    for schedule in schedules(world):
        bounds = boundaries(HUGE + 1, schedule.chunks, 1024)
        for rank in range(world):
            program = compile_program(schedule, rank, HUGE + 1, 2**28, 1024)
            assert sent_ranges(program) == wanted_ranges(schedule, rank, bounds)


def sent_ranges(program: Program) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """By round and peer: the ranges that are sent, neighbours joined. Pieces that overlap are not neighbours."""
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for step in program:
        for piece in step.sends:
            ranges[step.round, piece.peer].append((piece.lo, piece.hi))
    return {key: joined(sorted(some)) for key, some in ranges.items()}


def wanted_ranges(schedule: Schedule, rank: int, bounds: list[int]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The same from the schedule."""
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for number, transfer in schedule.transfers():
        lo, hi = bounds[transfer.lo], bounds[transfer.hi]
        if transfer.src == rank and lo < hi:
            ranges[number, transfer.dst].append((lo, hi))
    return {key: joined(sorted(some)) for key, some in ranges.items()}


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of which none begins where another ends."""
    found: list[tuple[int, int]] = []
    for lo, hi in ranges:
        if found and found[-1][1] == lo:
            found[-1] = (found[-1][0], hi)
        else:
            found.append((lo, hi))
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_the_busiest_rank_sends_what_the_schedule_costs(name: str, world: int) -> None:
    schedule = schedule_of(name, world)
    sent = [
        sum(piece.hi - piece.lo for step in compile_program(schedule, rank, HUGE, 2**28, 1) for piece in step.sends)
        for rank in range(world)
    ]
    assert max(sent) == schedule.cost.sent * HUGE


@given(numel=st.integers(0, 2000), segment=st.integers(1, 300), grain=st.integers(1, 64), world=st.integers(1, 9))
def test_no_piece_is_empty_or_longer_than_a_segment(numel: int, segment: int, grain: int, world: int) -> None:
    for name in ALGORITHMS:
        for rank in range(world):
            for step in compile_program(schedule_of(name, world), rank, numel, segment, grain):
                assert step.sends or step.receives
                assert all(0 < piece.hi - piece.lo <= segment for piece in (*step.sends, *step.receives))


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8])
def test_every_element_is_finished_once_and_by_one_rank(name: str, world: int) -> None:
    numel = 101
    schedule = schedule_of(name, world, hosts_of_sizes(uneven_hosts(world)))
    finished: dict[int, set[tuple[int, int, int]]] = defaultdict(set)
    for rank in range(world):
        for step in compile_program(schedule, rank, numel, 7, 1):
            for piece in step.receives:
                if piece.completes:
                    for element in range(piece.lo, piece.hi):
                        finished[element].add((rank, step.round, piece.lo))
    assert sorted(finished) == list(range(numel))
    assert all(len(where) == 1 for where in finished.values())


# What waits for what


def elements(pieces: Iterable[Piece]) -> set[int]:
    return {element for piece in pieces for element in range(piece.lo, piece.hi)}


def sends_too_early(before: Step, step: Step) -> bool:
    """Element by element: is read while it still changes."""
    return bool(elements(step.sends) & elements(before.receives))


def receives_too_early(before: Step, step: Step) -> bool:
    """Element by element: is overwritten while it is still read or changed."""
    copied = elements(piece for piece in step.receives if piece.op == "copy")
    return bool(copied & (elements(before.receives) | elements(before.sends)))


def last(steps: Iterable[Step], step: Step, is_in_the_way: Callable[[Step, Step], bool]) -> int:
    """How many steps there are up to the last one that is in the way of `step`."""
    return max((number for number, before in enumerate(steps, 1) if is_in_the_way(before, step)), default=0)


@settings(max_examples=40)
@given(numel=st.integers(0, 120), segment=st.integers(1, 30), grain=st.integers(1, 8), world=st.integers(1, 8))
def test_a_step_waits_if_and_only_if_it_must(numel: int, segment: int, grain: int, world: int) -> None:
    for schedule in schedules(world):
        for rank in range(world):
            program = compile_program(schedule, rank, numel, segment, grain)
            asked = 0
            for number, step in enumerate(program):
                before = program[:number]
                asked = max(asked, number - 4, last(before, step, receives_too_early))
                assert step.receives_after == asked
                assert step.sends_after == max(asked, number - 1, last(before, step, sends_too_early))


@pytest.mark.parametrize("segments", [2, 3, 8])
@pytest.mark.parametrize("world", range(2, 10))
def test_a_ring_of_two_segments_never_waits(world: int, segments: int) -> None:
    numel = world * segments * 10
    programs = [compile_program(schedule_of("ring", world), rank, numel, 10, 1) for rank in range(world)]
    assert all(len(program) == 2 * (world - 1) * segments for program in programs)
    for program in programs:
        assert [step.sends_after for step in program] == [max(number - 1, 0) for number in range(len(program))]


# A simulation of all ranks at once, with the executor's rules and an adversary who decides when bytes move. What
# is sent is read at any time from posting to arrival; what is copied lands at any time from posting to completion.


@dataclass
class Flight:
    """A step under way."""

    step: Step
    missing: int
    arrivals: list[tuple[Piece, list[int]]] = field(default_factory=list)


@dataclass
class Rank:
    """One rank: its memory, its program, the steps under way, and how many steps were opened, sent and completed."""

    memory: list[int]
    program: Program
    flights: list[Flight] = field(default_factory=list)
    sent: int = 0
    done: int = 0

    def may_receive(self) -> bool:
        opened = len(self.flights)
        return opened < len(self.program) and self.program[opened].receives_after <= self.done

    def may_send(self) -> bool:
        return self.sent < len(self.flights) and self.program[self.sent].sends_after <= self.done

    def may_complete(self) -> bool:
        return self.done < self.sent and not self.flights[self.done].missing


class Simulation:
    """Posts, arrivals and completions in an order that `chance` decides."""

    def __init__(self, programs: list[Program], memories: list[list[int]], chance: random.Random) -> None:
        self.chance = chance
        self.ranks = [Rank(list(memory), program) for memory, program in zip(memories, programs, strict=True)]
        self.sent: dict[tuple[int, int], deque] = defaultdict(deque)
        self.awaited: dict[tuple[int, int], deque] = defaultdict(deque)

    def run(self) -> list[list[int]]:
        """The memories at the end."""
        while moves := [*self.acts(), *self.arrivals()]:
            move, argument = self.chance.choice(moves)
            move(argument)
        assert all(rank.done == len(rank.program) for rank in self.ranks), "the ranks wait for one another"
        return [rank.memory for rank in self.ranks]

    def acts(self) -> list[tuple]:
        """Ranks that can post or complete a step."""
        can: list[tuple] = []
        for number, rank in enumerate(self.ranks):
            can += [(self.receive, number)] * rank.may_receive()
            can += [(self.send, number)] * rank.may_send()
            can += [(self.complete, number)] * rank.may_complete()
        return can

    def arrivals(self) -> list[tuple]:
        """Pairs of ranks between which a message can arrive."""
        return [(self.arrive, pair) for pair, messages in self.sent.items() if messages and self.awaited[pair]]

    def receive(self, number: int) -> None:
        rank = self.ranks[number]
        step = rank.program[len(rank.flights)]
        flight = Flight(step, len(step.sends) + len(step.receives))
        rank.flights.append(flight)
        for piece in step.receives:
            self.awaited[piece.peer, number].append((flight, piece))

    def send(self, number: int) -> None:
        rank = self.ranks[number]
        flight = rank.flights[rank.sent]
        rank.sent += 1
        for piece in flight.step.sends:
            read = rank.memory[piece.lo : piece.hi] if self.chance.random() < 0.5 else None
            self.sent[number, piece.peer].append((flight, piece, read))

    def arrive(self, pair: tuple[int, int]) -> None:
        (sending, sent, read), (receiving, piece) = self.sent[pair].popleft(), self.awaited[pair].popleft()
        data = self.ranks[pair[0]].memory[sent.lo : sent.hi] if read is None else read
        if piece.op == "copy":
            self.ranks[pair[1]].memory[piece.lo : piece.hi] = data
        else:
            receiving.arrivals.append((piece, data))
        sending.missing -= 1
        receiving.missing -= 1

    def complete(self, number: int) -> None:
        rank = self.ranks[number]
        flight = rank.flights[rank.done]
        rank.done += 1
        for piece, data in flight.arrivals:
            for element, value in zip(range(piece.lo, piece.hi), data, strict=True):
                rank.memory[element] += value


def memories(world: int, numel: int) -> list[list[int]]:
    """i * W + rank, as everywhere."""
    return [[i * world + rank for i in range(numel)] for rank in range(world)]


def sums(world: int, numel: int) -> list[int]:
    return [i * world**2 + world * (world - 1) // 2 for i in range(numel)]


@settings(max_examples=100)
@given(
    name=st.sampled_from(COLLECTIVES),
    world=st.integers(1, 7),
    numel=st.integers(0, 40),
    segment=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_no_timing_changes_the_answer(name: str, world: int, numel: int, segment: int, seed: int) -> None:
    schedule = schedule_of(name, world, hosts_of_sizes(uneven_hosts(world)))
    programs = [compile_program(schedule, rank, numel, segment, 1) for rank in range(world)]
    results = Simulation(programs, memories(world, numel), random.Random(seed)).run()
    assert results == [sums(world, numel)] * world


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_waiting_some_timing_gives_a_wrong_answer(name: str) -> None:
    world, numel = 4, 24
    schedule = schedule_of(name, world)
    programs = [compile_program(schedule, rank, numel, numel, 1) for rank in range(world)]
    programs = [tuple(step._replace(receives_after=0, sends_after=0) for step in program) for program in programs]
    outcomes = [Simulation(programs, memories(world, numel), random.Random(seed)).run() for seed in range(50)]
    assert any(outcome != [sums(world, numel)] * world for outcome in outcomes)
