"""Ranks as processes of this machine that share memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncline.fabric.deadlines import Deadlines
from syncline.fabric.shm import Meeting, ShmFabric

if TYPE_CHECKING:
    from syncline.launch.processes import Join


@dataclass(frozen=True)
class ShmProcesses:
    """How to set up local processes that share memory: give it to `run` as `fabric`."""

    deadlines: Deadlines = field(default_factory=Deadlines)

    def prepare(self, world: int) -> tuple[Join, Callable[[], None]]:
        """Nothing to keep: the ranks meet by themselves."""
        return JoinShm(Meeting(), self.deadlines), lambda: None


@dataclass(frozen=True)
class JoinShm:
    """How one rank joins."""

    meeting: Meeting
    deadlines: Deadlines

    def __call__(self, rank: int, world: int) -> ShmFabric:
        """Meet the others over a local socket."""
        return ShmFabric(self.meeting, rank, world, self.deadlines)
