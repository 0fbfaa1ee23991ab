"""`run(fn, ranks=4)`: call a function on local ranks, each with its fabric, and return what they returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from syncline.errors import ConfigError, UnknownName
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.shm import MOST_RANKS, missing
from syncline.fabric.threads import Threads
from syncline.launch.processes import run_processes
from syncline.launch.shm import ShmProcesses
from syncline.launch.threads import run_threads
from syncline.launch.torch import TorchProcesses

if TYPE_CHECKING:
    from syncline.fabric.base import Fabric

T = TypeVar("T")
Setup = Threads | TorchProcesses | ShmProcesses
SETUPS: dict[str, type[Setup]] = {"threads": Threads, "torch": TorchProcesses, "shm": ShmProcesses}


def run(
    fn: Callable[[Fabric], T],
    ranks: int = 4,
    fabric: str | Setup = "auto",
    deadlines: Deadlines | None = None,
    keep_going: bool = False,
    restarts: int = 0,
) -> list[T]:
    """Call `fn(fabric)` on every rank and return the results in order of rank.

    `fabric` is `"shm"` (a process each, through shared memory: the default where the native module was built),
    `"torch"` (a process each, over Gloo), `"threads"` (all ranks in this process), or such a setup with settings:
    `Threads(faults=[...])`. Inside `fn` that fabric is the current one. When a rank fails the others are stopped, and
    `RankFailed` is raised with the traceback of the rank that failed first. With `keep_going` they are not stopped,
    which is for modes that survive the loss of a rank; the results of those that succeeded are in the error.

    A rank that is stopped, as by SIGSTOP, is waited for as long as others work. When all that are left are stopped,
    they have 5 s to go on; then they are killed, and are among the failures. One that is only slow is not hurried.

    With `keep_going` and `restarts`, a rank whose process ended without a result gets a new one, so many times: `fn` is
    called there from its first line, with a fabric whose `incarnation` is 1, 2... It is for modes async and bounded.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks} is less than 1; try ranks=2")
    if restarts < 0:
        raise ConfigError(f"restarts={restarts} is less than 0; try restarts=2")
    if restarts and not keep_going:
        raise ConfigError(f"restarts={restarts} needs ranks that go on meanwhile; say keep_going=True too")
    if fabric == "auto":
        fabric = "torch" if missing() or ranks > MOST_RANKS else "shm"
    setup = setup_of(fabric, deadlines)
    if isinstance(setup, Threads) and restarts:
        raise ConfigError(f'restarts={restarts} needs processes; threads share one: use fabric="shm" or "torch"')
    if isinstance(setup, Threads):
        return run_threads(fn, setup.group(ranks))
    return run_processes(fn, ranks, setup, keep_going, restarts)


def setup_of(fabric: str | Setup, deadlines: Deadlines | None) -> Setup:
    """The setup that was named or given, with these deadlines if there are any."""
    if isinstance(fabric, str):
        if fabric not in SETUPS:
            raise UnknownName("fabric", fabric, ["auto", *SETUPS])
        fabric = SETUPS[fabric]()
    settings: dict[str, Any] = {"deadlines": deadlines} if deadlines else {}
    return dataclasses.replace(fabric, **settings)
