"""Ranks that come later: a new process in the place of one that died.

The groups of the others do not contain it, so it has no part in their collectives. What it can do is knock at the door
of a rank that was there from the start, and talk with that one alone, through a fabric of two:

    door = fabric.door()                      rank 0, from the start
    knock = door.look()                       now and then, whether somebody is there
    pair = door.let_in(knock)

    pair = fabric.knock_at(0)                 the newcomer, until it is let in

A fabric and its siblings have doors of their own: who makes the same siblings in the same order finds the right one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn, Self

from torch import Tensor

from syncline.collectives.execute import Op, Pending
from syncline.collectives.schedule import hosts_of_sizes
from syncline.errors import FabricError, JoinFailed
from syncline.fabric.base import NO_NOTE, Fabric, Handle, Note
from syncline.fabric.channel import Channel
from syncline.fabric.deadlines import Deadlines

ABSENT_S = 10.0  # a rank whose door is not there for so long has ended
GREETING_S = 10.0  # both sides are about to meet; it takes longer only if one of them dies just then
PAUSE_S = 0.02


class Knock(NamedTuple):
    """Who is at the door."""

    rank: int
    incarnation: int


class Door(ABC):
    """One rank's, for newcomers."""

    @abstractmethod
    def look(self) -> Knock | None:
        """Who is there; does not wait."""

    @abstractmethod
    def let_in(self, knock: Knock) -> Fabric:
        """The fabric of two, in which this rank is 0 and the newcomer 1; raises `JoinFailed` if it is gone."""

    @abstractmethod
    def close(self) -> None:
        """Nobody is let in any more."""


class Doorstep(ABC):
    """A newcomer's side of a door."""

    @abstractmethod
    def is_there(self) -> bool:
        """Whether there is a door; it goes when its rank ends."""

    @abstractmethod
    def knock(self) -> None:
        """Once."""

    @abstractmethod
    def is_open(self) -> bool:
        """Whether this newcomer has been told to come in."""

    def wait(self, join_s: float) -> None:
        """Be told to come in; raises `JoinFailed` when the door is not there or nobody opens."""
        wait_for(self.is_there, min(ABSENT_S, join_s), "it has no door for newcomers: it has ended, or serves nobody")
        self.knock()
        wait_for(lambda: self.is_open() or not self.is_there(), join_s, f"it did not answer for {join_s} s")
        if not self.is_open():
            raise JoinFailed("it has closed its door for newcomers: it has ended")

    def close(self) -> None:
        """Give back what this side holds."""


class Doors(ABC):
    """How ranks of a job and newcomers find each other."""

    deadlines: Deadlines

    @abstractmethod
    def open(self, place: str) -> Door:
        """Make a door."""

    @abstractmethod
    def before(self, place: str, knock: Knock) -> Doorstep:
        """Stand before a door."""

    @abstractmethod
    def pair(self, place: str, knock: Knock, rank: int) -> Fabric:
        """The fabric of two, made on both sides at the same time."""

    def enter(self, place: str, knock: Knock) -> Fabric:
        """Be let in at a door."""
        doorstep = self.before(place, knock)
        try:
            doorstep.wait(self.deadlines.join)
        finally:
            doorstep.close()
        return self.pair(place, knock, 1)

    def greeting(self) -> Deadlines:
        """For meeting somebody who is at the door."""
        return replace(self.deadlines, join=min(self.deadlines.join, GREETING_S))


def wait_for(what: Callable[[], bool], seconds: float, else_: str) -> None:
    """Wait until it is so; raise `JoinFailed` if it takes longer."""
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            raise JoinFailed(else_)
        time.sleep(PAUSE_S)


class Newcomer(Fabric):
    """The fabric of a rank that comes later."""

    def __init__(self, rank: int, world: int, incarnation: int, doors: Doors) -> None:
        super().__init__(rank, world, hosts_of_sizes([world]), doors.deadlines)
        self.incarnation = incarnation
        self.doors: Doors = doors
        self.after: list[Callable[[], None]] = []  # what to give back at the end

    def knock_at(self, rank: int) -> Fabric:
        knock = Knock(self.rank, self.incarnation)
        try:
            pair = self.doors.enter(self.place_of(self._peer(rank)), knock)
        except JoinFailed as error:
            raise JoinFailed(
                f"rank {self.rank} came later (incarnation {self.incarnation}), "
                f"and rank {rank} did not let it in: {error}"
            ) from None
        self.siblings.append(pair)
        return pair

    def refuse(self) -> NoReturn:
        """What needs all ranks needs those that came at the start."""
        raise FabricError(
            f"rank {self.rank} came later (incarnation {self.incarnation}), and the groups of the others do not "
            f"contain it: it takes no part in their collectives. Ask `if not fabric.incarnation:` before them; "
            f"modes async and bounded take newcomers"
        )

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Pending:
        self.refuse()

    def barrier(self) -> None:
        """There is none."""
        self.refuse()

    def write_note(self, note: Note) -> None:
        """Nobody could read it."""

    def note_of(self, rank: int) -> Note:
        return NO_NOTE

    def _channel(self) -> Channel:
        self.refuse()

    def _abort(self, why: str) -> None:
        """Nobody waits for it."""

    def _sibling(self) -> Self:
        return type(self)(self.rank, self.world, self.incarnation, self.doors)

    def _subgroup(self, ranks: tuple[int, ...], number: int) -> Self:
        self.refuse()

    def _close(self, drain: bool) -> None:
        while self.after:
            self.after.pop()()

    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> None:
        self.refuse()

    def _all_reduce_async(self, tensor: Tensor, op: Op, collective: str) -> Handle:
        self.refuse()

    def _reduce_scatter(self, tensor: Tensor, op: Op) -> Tensor:
        self.refuse()

    def _all_gather(self, tensor: Tensor) -> Tensor:
        self.refuse()

    def _broadcast(self, flat: Tensor, root: int) -> None:
        self.refuse()

    def _all_to_all(self, flat: Tensor) -> Tensor:
        self.refuse()
