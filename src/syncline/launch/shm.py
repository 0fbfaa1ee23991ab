"""Ranks as processes of this machine that share memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncline.fabric.deadlines import Deadlines
from syncline.fabric.shm import Meeting, ShmFabric
from syncline.fabric.shm_doors import ShmDoors, ShmNewcomer

if TYPE_CHECKING:
    from syncline.fabric.base import Fabric
    from syncline.launch.processes import Join, Life


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

    def __call__(self, rank: int, world: int, life: Life) -> Fabric:
        """Meet the others over a local socket; a newcomer meets nobody yet."""
        doors = ShmDoors(self.meeting, self.deadlines)
        if life.incarnation:
            return ShmNewcomer(rank, world, life.incarnation, doors)
        fabric = ShmFabric(self.meeting, rank, world, self.deadlines)
        fabric.doors = doors if life.restarts else None
        return fabric
