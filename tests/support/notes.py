"""Notes and times that ranks leave on the board of their fabric. Light: ranks import it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from support.faulty import remove
from support.guarded import NOTE_S
from support.processes import process_at
from support.striking import be_stopped, report_and_stay
from syncline.fabric.base import Fabric

# Notes


def notes_seen(fabric: Fabric, expected: list[tuple[int, int, int, int]], within_s: float) -> list:
    """The notes of all ranks, as soon as they are those that are expected."""
    until = time.monotonic() + within_s
    while (
        seen := [fabric.health.progress_of(rank) for rank in range(fabric.world)]
    ) != expected and time.monotonic() < until:
        time.sleep(0.05)
    return seen


def note_for(rank: int, turn: int) -> tuple[int, int, int, int]:
    return rank + 1, turn, 2**40 + rank, 4


def exchange_notes(fabric: Fabric, within_s: float) -> list[list]:
    """What is seen before anybody has written, and after each of two turns."""
    everyone = range(fabric.world)
    sibling = fabric.subgroup()
    seen = [[fabric.health.progress_of(rank) for rank in everyone]]
    for turn in (1, 2):
        fabric.barrier()
        fabric.health.publish(note_for(fabric.rank, turn))
        seen.append(notes_seen(fabric, [note_for(rank, turn) for rank in everyone], within_s))
    seen.append([sibling.health.progress_of(rank) for rank in everyone])
    fabric.barrier()
    return seen


def read_the_note_of_a_stopped_rank(fabric: Fabric, victim: int, folder: str) -> tuple[str, tuple, float]:
    """The state of the process of the victim, its note, and how long it took to read it."""
    pids = fabric.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
    if fabric.rank == victim:
        fabric.health.publish((7, 8, 9, 10))
        time.sleep(NOTE_S)
        be_stopped()
    state = wait_for_state(pids[victim], "T")
    started = time.monotonic()
    note = fabric.health.progress_of(victim)
    seconds = time.monotonic() - started
    report_and_stay(fabric, folder)
    remove(pids[victim])
    return state, note, seconds


def wait_for_state(pid: int, wanted: str) -> str:
    """The state of a process, when it is the one that is wanted or after far too long."""
    until = time.monotonic() + 20.0
    while (state := process_at(Path(f"/proc/{pid}")).state) != wanted and time.monotonic() < until:
        time.sleep(0.02)
    return state


# Times


def times_with_a_late_rank(fabric: Fabric, late: int, seconds: float) -> list[int]:
    """Of one call: the clock before it, its three times, and the clock after it."""
    fabric.all_reduce_async(torch.ones(10)).wait()
    fabric.barrier()
    if fabric.rank == late:
        time.sleep(seconds)
    before = time.monotonic_ns()
    handle = fabric.all_reduce_async(torch.ones(1000))
    handle.wait()
    return [before, *handle.times(), time.monotonic_ns()]


def times_of_many(fabric: Fabric, count: int) -> list[list[int]]:
    """Of calls that were started one right after the other."""
    handles = [fabric.all_reduce_async(torch.ones(10_000)) for _ in range(count)]
    for handle in handles:
        handle.wait()
    return [list(handle.times()) for handle in handles]


def notes_seen_beyond(fabric: Fabric) -> None:
    """Ask for a rank that is not there."""
    fabric.health.progress_of(fabric.world)
