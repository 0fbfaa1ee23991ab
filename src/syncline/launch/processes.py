"""Ranks as processes of this machine.

Processes come from a fork server that has imported torch once, so four of them start in a fraction of a second and
none inherits this process's threads. A function that cannot be sent to another process (a lambda, a local function, a
notebook cell) is inherited by a plain fork instead; that works as long as this process has not run a backward
pass, which torch does not allow to be forked.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from syncline.current import using
from syncline.errors import ConfigError, PeerError
from syncline.launch.descendants import descendants_of, kill_all
from syncline.launch.failures import Failure, ProcessEnded, ProcessStopped, last_of, rank_failed

if TYPE_CHECKING:
    from syncline.fabric.base import Fabric

T = TypeVar("T")
PRELOADED = ["torch.distributed", "torch._dynamo", "syncline.launch"]  # optimizers import the second, slowly
GRACE_S = 5.0  # for the others to fail by themselves, with an error that says why
ENDING_S = 2.0  # between asking a process to end and killing it
LOOK_S = 0.2  # between looks at processes that may be stopped


@dataclass(frozen=True)
class Life:
    """Of a rank's process, among those that have the rank one after the other."""

    incarnation: int = 0
    restarts: int = 0  # how many there may be after the first one

    def next(self) -> Life:
        """After its end."""
        return replace(self, incarnation=self.incarnation + 1)


class Join(Protocol):
    """Sent to every rank: how it gets its fabric."""

    def __call__(self, rank: int, world: int, life: Life) -> Fabric: ...


class Setup(Protocol):
    """What the starting process does before and after."""

    def prepare(self, world: int) -> tuple[Join, Callable[[], None]]:
        """What ranks need to join, and how to clean up after them."""


def run_processes(
    fn: Callable[[Fabric], T], world: int, setup: Setup, keep_going: bool = False, restarts: int = 0
) -> list[T]:
    """Call `fn` in one process per rank."""
    context = context_for(fn)
    join, clean_up = setup.prepare(world)
    ranks: list[Rank] = []

    def begin(number: int, life: Life) -> Rank:
        return start(context, number, world, join, fn, life)

    try:
        for number in range(world):
            ranks.append(begin(number, Life(restarts=restarts)))
        return collect(ranks, keep_going, begin)
    finally:
        end(ranks)
        clean_up()


def context_for(fn: Callable[..., Any]) -> BaseContext:
    """The fork server where the function can be sent there, a plain fork elsewhere."""
    if not can_be_sent(fn):
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def can_be_sent(fn: Callable[..., Any]) -> bool:
    """Whether a new process can find the function: not if it is local, or in a program that no file holds."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    try:
        pickled = pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    if program is None:
        return b"__main__" not in pickled
    return os.path.exists(program)


@dataclass
class Rank:
    """A rank's process, and what is known of it."""

    number: int
    process: BaseProcess
    inbox: Connection
    result: Any = None
    failure: Failure | None = None
    heard: bool = field(default=False)
    life: Life = field(default=Life())
    earlier: list[Failure] = field(default_factory=list)  # of processes that had this rank before


def start(context: BaseContext, number: int, world: int, join: Join, fn: Callable[..., Any], life: Life) -> Rank:
    """Start one rank."""
    inbox, outbox = context.Pipe(duplex=False)
    process = context.Process(  # type: ignore[attr-defined]
        target=be_rank,
        args=(number, world, join, fn, life, multiprocessing.get_start_method(), outbox),
        name=f"rank {number}",
        daemon=True,
    )
    process.start()
    outbox.close()
    return Rank(number, process, inbox, life=life)


def collect(ranks: list[Rank], keep_going: bool, begin: Callable[[int, Life], Rank]) -> list[Any]:
    """Wait for all ranks; once one has failed, for a little longer only, unless they are to go on.

    When all that have not ended are stopped, they have as long to go on.
    """
    until = stopped_until = math.inf
    while waiting := [rank for rank in ranks if not rank.heard]:
        left = min(until, stopped_until) - time.monotonic()
        if left <= 0:
            break
        nobody_ended = len(waiting) == len(ranks)
        ready = wait([rank.inbox for rank in waiting], timeout=None if nobody_ended else min(left, LOOK_S))
        for rank in (rank for rank in waiting if rank.inbox in ready):
            hear(rank, order=sum(other.heard for other in ranks))
            if rank.failure and not keep_going:
                until = min(until, time.monotonic() + GRACE_S)
        if ready or not all(map(is_stopped, waiting)):
            stopped_until = math.inf
        else:
            stopped_until = min(stopped_until, time.monotonic() + GRACE_S)
        replace_ended(ranks, begin)
    for rank in filter(is_stopped, waiting):
        stopped = ProcessStopped(rank.number)
        rank.failure = Failure(rank.number, stopped, str(stopped), len(ranks) + rank.number)
    failures = [last_of(rank.failure, rank.earlier) for rank in ranks if rank.failure]
    if failures:
        raise rank_failed(failures, {rank.number: rank.result for rank in ranks if succeeded(rank)})
    return [rank.result for rank in ranks]


def succeeded(rank: Rank) -> bool:
    """Whether a result has come."""
    return rank.heard and rank.failure is None


def is_stopped(rank: Rank) -> bool:
    """Whether a process is kept from running by a signal, as by SIGSTOP; one that a debugger holds is not."""
    try:
        return Path(f"/proc/{rank.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def hear(rank: Rank, order: int) -> None:
    """Read a rank's result, its failure, or its silence."""
    rank.heard = True
    try:
        kind, first, second = pickle.loads(rank.inbox.recv_bytes())
    except EOFError:
        rank.process.join(ENDING_S)
        ended = ProcessEnded(rank.number, rank.process.exitcode or 0)
        rank.failure = Failure(rank.number, ended, str(ended), order)
        return
    if kind == "result":
        rank.result = first
    else:
        rank.failure = Failure(rank.number, first, second, order)


def replace_ended(ranks: list[Rank], begin: Callable[[int, Life], Rank]) -> None:
    """Start new processes for ranks that have failed, where that may help."""
    for position, rank in enumerate(ranks):
        if rank.failure is not None and may_help(rank, ranks):
            end([rank])
            ranks[position] = begin(rank.number, rank.life.next())
            ranks[position].earlier = [*rank.earlier, rank.failure]


def may_help(rank: Rank, ranks: list[Rank]) -> bool:
    """Not if the function asks for what is impossible, everyone else has ended, or the one that it needs has failed."""
    if rank.life.incarnation >= rank.life.restarts or all(other.heard for other in ranks):
        return False
    error = rank.failure.error if rank.failure is not None else None
    lost = {other.number for other in ranks if other.failure is not None or other.earlier}
    return not isinstance(error, ConfigError) and not (isinstance(error, PeerError) and error.rank in lost)


def end(ranks: list[Rank]) -> None:
    """Leave no process behind."""
    for rank in ranks:
        if is_stopped(rank):
            end_at_once(rank, rank.process.kill)  # it would not hear anything else
        elif not succeeded(rank):
            end_at_once(rank, rank.process.terminate)
    until = time.monotonic() + ENDING_S
    for rank in ranks:
        rank.process.join(max(until - time.monotonic(), 0.0))
        if rank.process.is_alive():
            end_at_once(rank, rank.process.kill)
            rank.process.join()
        rank.inbox.close()
        rank.process.close()


def end_at_once(rank: Rank, strike: Callable[[], None]) -> None:
    """End a process together with those that it has started, which would be nobody's after it."""
    started = descendants_of(rank.process.pid) if rank.process.is_alive() else []
    strike()
    kill_all(started)


def be_rank(
    number: int,
    world: int,
    join: Join,
    fn: Callable[[Fabric], Any],
    life: Life,
    start_method: str,
    outbox: Connection,
) -> None:
    """The life of a rank's process, which starts others as the starting process would."""
    import torch

    multiprocessing.current_process().daemon = False  # it is one to the starting process, and yet may start others
    multiprocessing.set_start_method(start_method, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the starting process, which ends the ranks
    end_with_parent()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    process = os.getpid()
    try:
        with join(number, world, life) as fabric, using(fabric):
            message = ("result", fn(fabric), None)
        end_forked(process)
        outbox.send_bytes(pickle.dumps(message))
    except BaseException as error:
        end_forked(process, error)
        outbox.send_bytes(failure_message(error, traceback.format_exc()))
    outbox.close()


def end_forked(rank: int, error: BaseException | None = None) -> None:
    """A child that the function has forked ends here: it is not the rank, and has nothing to say for it."""
    if os.getpid() == rank:
        return
    if isinstance(error, Exception):
        traceback.print_exc()
    code = error.code if isinstance(error, SystemExit) else error and 1
    os._exit(code if isinstance(code, int) else int(code is not None))


def failure_message(error: BaseException, text: str) -> bytes:
    """A failure as bytes; an exception that cannot be sent goes as text."""
    try:
        message = pickle.dumps(("failure", error, text))
        pickle.loads(message)
    except Exception:
        return pickle.dumps(("failure", RuntimeError(f"{type(error).__name__}: {error}"), text))
    return message


def end_with_parent() -> None:
    """See to it that this process does not outlive the one that started it, and neither do those that it starts."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            kill_all(descendants_of(os.getpid()))
            os._exit(1)

    threading.Thread(target=watch, name="watches the starting process", daemon=True).start()
