"""Proof that a schedule does what it says: a symbolic run over all ranks.

Every chunk of every rank holds, for each rank, how often that rank's contribution is in it. The run checks that

- a transfer names ranks and chunks that exist, and nobody sends to itself
- nobody sends a chunk it has nothing in, or adds to one
- within a round no chunk that is read is changed, and none is changed in two ways
- every chunk of a sum is completed by adding at one rank only, and copied everywhere else: the same bits
- at the end every rank holds exactly what the goal says, each contribution exactly once
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.collectives.schedule import Round, Schedule, Transfer
from syncline.errors import ScheduleError

State = npt.NDArray[np.int16]  # [rank, chunk, contributor] -> how often


def verify(schedule: Schedule) -> None:
    """Raise `ScheduleError` where the schedule is wrong, naming the round and the transfer."""
    state = initial(schedule)
    owners: dict[int, int] = {}
    for number, transfers in enumerate(schedule.rounds):
        for transfer in transfers:
            check_transfer(schedule, number, transfer, state)
        check_round(schedule, number, transfers)
        apply(state, transfers)
        note_owners(schedule, number, transfers, state, owners)
    check_goal(schedule, state)


def initial(schedule: Schedule) -> State:
    """What each rank has before the first round."""
    state = np.zeros((schedule.world, schedule.chunks, schedule.world), np.int16)
    for rank in range(schedule.world):
        for chunk in range(schedule.chunks):
            state[rank, chunk, rank] = schedule.starts_with(rank, chunk)
    return state


def apply(state: State, transfers: Round) -> None:
    """All transfers of a round read the state before it."""
    payloads = [state[t.src, t.lo : t.hi].copy() for t in transfers]
    for t, payload in zip(transfers, payloads, strict=True):
        if t.op == "add":
            state[t.dst, t.lo : t.hi] += payload
        else:
            state[t.dst, t.lo : t.hi] = payload


def check_transfer(schedule: Schedule, number: int, transfer: Transfer, state: State) -> None:
    """The names exist and there is something to send."""
    ranks = range(schedule.world)
    if transfer.src not in ranks or transfer.dst not in ranks or transfer.src == transfer.dst:
        fail(schedule, number, transfer, "needs two different ranks of this world")
    if not 0 <= transfer.lo < transfer.hi <= schedule.chunks:
        fail(schedule, number, transfer, f"needs 0 <= lo < hi <= {schedule.chunks}")
    if transfer.op not in ("add", "copy"):
        fail(schedule, number, transfer, "can only add or copy")
    if not state[transfer.src, transfer.lo : transfer.hi].any(axis=1).all():
        fail(schedule, number, transfer, "sends a chunk that holds nothing yet")
    if transfer.op == "add" and not state[transfer.dst, transfer.lo : transfer.hi].any(axis=1).all():
        fail(schedule, number, transfer, "adds to a chunk that holds nothing yet")


def check_round(schedule: Schedule, number: int, transfers: Round) -> None:
    """Nothing is read and changed, nor changed in two ways, in one round."""
    read = np.zeros((schedule.world, schedule.chunks), bool)
    for t in transfers:
        read[t.src, t.lo : t.hi] = True
    changed: npt.NDArray[Any] = np.zeros((schedule.world, schedule.chunks), "U4")
    for t in transfers:
        if read[t.dst, t.lo : t.hi].any():
            fail(schedule, number, t, "changes a chunk that is read in the same round")
        before = changed[t.dst, t.lo : t.hi]
        if ((before == "copy") | ((before != "") & (t.op == "copy"))).any():
            fail(schedule, number, t, "changes a chunk that another transfer of the round overwrites")
        changed[t.dst, t.lo : t.hi] = t.op


def note_owners(schedule: Schedule, number: int, transfers: Round, state: State, owners: dict[int, int]) -> None:
    """Who completed which chunk by adding."""
    for t in transfers:
        if t.op != "add":
            continue
        complete = np.all(state[t.dst, t.lo : t.hi] > 0, axis=1)
        if complete.any() and not complete.all():
            fail(
                schedule, number, t, "completes some of its chunks and leaves others, so it cannot be finished at once"
            )
        for chunk in range(t.lo, t.hi):
            if complete[chunk - t.lo] and owners.setdefault(chunk, t.dst) != t.dst:
                fail(schedule, number, t, f"completes chunk {chunk}, which rank {owners[chunk]} completes too")


def check_goal(schedule: Schedule, state: State) -> None:
    """Every rank ends with what it should."""
    for rank in range(schedule.world):
        for chunk in range(schedule.chunks):
            wanted = expected(schedule, rank, chunk)
            if wanted is not None and not np.array_equal(state[rank, chunk], wanted):
                raise ScheduleError(
                    f"{schedule.algorithm} over {schedule.world} ranks: rank {rank} ends with contributions "
                    f"{state[rank, chunk].tolist()} in chunk {chunk} instead of {wanted.tolist()}"
                )


def expected(schedule: Schedule, rank: int, chunk: int) -> npt.NDArray[np.int16] | None:
    """How often each contribution should be in a chunk at the end; None where it does not matter."""
    world = schedule.world
    everyone = np.ones(world, np.int16)
    one = np.zeros(world, np.int16)
    match schedule.goal:
        case "all_reduce":
            return everyone
        case "reduce_scatter":
            return everyone if chunk == rank else None
        case "all_gather":
            one[chunk] = 1
        case "broadcast":
            one[schedule.root] = 1
        case "all_to_all":
            if chunk % world != rank:
                return None
            one[chunk // world] = 1
    return one


def fail(schedule: Schedule, number: int, transfer: Transfer, rule: str) -> None:
    """Say which transfer breaks which rule."""
    raise ScheduleError(
        f"{schedule.algorithm} over {schedule.world} ranks, round {number}: "
        f"{transfer.src} -> {transfer.dst} {transfer.op} chunks {transfer.lo}..{transfer.hi - 1} {rule}"
    )
