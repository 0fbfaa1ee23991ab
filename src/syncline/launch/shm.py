"""Ranks as processes of this machine that share memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncline.fabric.base import Fabric
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.membership import ReplacementTransport
from syncline.fabric.shm import Meeting, shm_fabric
from syncline.fabric.shm_membership import ShmMembership

if TYPE_CHECKING:
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
        """Meet the others over a local socket; a replacement worker meets nobody yet."""
        membership = ShmMembership(self.meeting, self.deadlines)
        if life.incarnation:
            transport = ReplacementTransport("shm", rank, world, life.incarnation, self.deadlines)
            return Fabric(transport, membership=membership)
        fabric = shm_fabric(self.meeting, rank, world, self.deadlines)
        fabric.membership = membership if life.restarts else None
        return fabric
