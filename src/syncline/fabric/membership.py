"""Membership: a new process that takes the place of one that died, and how it and the others find each other.

The groups of the others do not contain the replacement worker, so it has no part in their collectives. It can ask a
rank that was there from the start to let it rejoin, and talk with that one alone, through a fabric of two:

    endpoint = fabric.membership.listen(fabric)         rank 0, from the start
    request = endpoint.poll()                           now and then, whether somebody asks
    pair = endpoint.accept(request)

    pair = fabric.membership.rejoin(fabric, 0)          the replacement worker, until it is accepted

A fabric and its subgroups of all ranks have endpoints of their own: who makes the same ones in the same order finds the
right one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from syncline.collectives.execute import Pending
from syncline.core.group import Group
from syncline.errors import FabricError, JoinFailed
from syncline.fabric.base import Fabric
from syncline.fabric.calls import Calls, check_rank
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.health import NO_PROGRESS, Health, RankProgress
from syncline.fabric.transport import Messages, Transport

if TYPE_CHECKING:
    from syncline.fabric.channel import Channel

ABSENT_S = 10.0  # a rank whose endpoint is not there for so long has ended
MEETING_S = 10.0  # both sides are about to connect; it takes longer only if one of them dies just then
PAUSE_S = 0.02


class RejoinRequest(NamedTuple):
    """Who wants to rejoin."""

    rank: int
    incarnation: int


class RejoinEndpoint(ABC):
    """Where one rank hears requests."""

    @abstractmethod
    def poll(self) -> RejoinRequest | None:
        """The next request, if there is one; does not wait."""

    @abstractmethod
    def accept(self, request: RejoinRequest) -> Fabric:
        """The fabric of two, in which this rank is 0 and the replacement 1; raises `JoinFailed` if it is gone."""

    @abstractmethod
    def close(self) -> None:
        """Accept no request any more."""


class RejoinAttempt(ABC):
    """A replacement worker's side of an endpoint."""

    @abstractmethod
    def can_ask(self) -> bool:
        """Whether the endpoint is there; it goes when its rank ends."""

    @abstractmethod
    def ask(self) -> None:
        """Send one rejoin request."""

    @abstractmethod
    def is_accepted(self) -> bool:
        """Whether the request has been accepted."""

    def wait(self, join_s: float) -> None:
        """Wait until the request is accepted; raise `JoinFailed` when the endpoint is not there or does not answer."""
        wait_for(self.can_ask, min(ABSENT_S, join_s), "it accepts nobody: it has ended, or serves nobody")
        self.ask()
        wait_for(lambda: self.is_accepted() or not self.can_ask(), join_s, f"it did not answer for {join_s} s")
        if not self.is_accepted():
            raise JoinFailed("it accepts nobody any more: it has ended")

    def close(self) -> None:
        """Give back what this side holds."""


class Membership(ABC):
    """How the ranks of a job and replacement workers find each other."""

    deadlines: Deadlines

    @abstractmethod
    def endpoint(self, place: str) -> RejoinEndpoint:
        """Make the endpoint of this rank at a place."""

    @abstractmethod
    def attempt(self, place: str, request: RejoinRequest) -> RejoinAttempt:
        """Begin to rejoin at a place."""

    @abstractmethod
    def pair(self, place: str, request: RejoinRequest, rank: int) -> Fabric:
        """The fabric of two, made on both sides at the same time."""

    def listen(self, fabric: Fabric) -> RejoinEndpoint:
        """The endpoint of this rank in a fabric."""
        return self.endpoint(place_of(fabric, fabric.rank))

    def rejoin(self, fabric: Fabric, rank: int) -> Fabric:
        """On a replacement worker: the fabric of two with a rank that was there from the start, which is 0 in it."""
        place = place_of(fabric, check_rank(rank, fabric.world))
        request = RejoinRequest(fabric.rank, fabric.incarnation)
        try:
            attempt = self.attempt(place, request)
            try:
                attempt.wait(self.deadlines.join)
            finally:
                attempt.close()
            pair = self.pair(place, request, 1)
        except JoinFailed as error:
            raise JoinFailed(
                f"rank {request.rank} came later (incarnation {request.incarnation}), "
                f"and rank {rank} did not let it rejoin: {error}"
            ) from None
        fabric.children.append(pair)
        return pair

    def meeting_deadlines(self) -> Deadlines:
        """Deadlines for connecting with somebody who is just about to do the same."""
        return replace(self.deadlines, join=min(self.deadlines.join, MEETING_S))


def place_of(fabric: Fabric, rank: int) -> str:
    """The endpoint of a rank in a fabric, by the same name on all ranks."""
    return f"{fabric.path}/rank {rank}"


def wait_for(what: Callable[[], bool], seconds: float, else_: str) -> None:
    """Wait until it is so; raise `JoinFailed` if it takes longer."""
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            raise JoinFailed(else_)
        time.sleep(PAUSE_S)


class NoPeers(Health):
    """The health of a replacement worker, which nobody waits for."""

    def publish(self, progress: RankProgress) -> None:
        """Nobody could read it."""

    def progress_of(self, rank: int) -> RankProgress:
        return NO_PROGRESS

    def abort(self, why: str) -> None:
        """Nothing is under way."""


class ReplacementTransport(Transport):
    """The transport of a replacement worker: what needs all ranks needs those that came at the start."""

    def __init__(self, name: str, rank: int, world: int, incarnation: int, deadlines: Deadlines) -> None:
        super().__init__(rank, Group.on_hosts([0] * world), deadlines)
        self.name = name
        self.incarnation = incarnation
        self.health = NoPeers()

    def calls(self) -> Calls:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Say why there are no collectives here."""
        raise FabricError(
            f"rank {self.rank} came later (incarnation {self.incarnation}), and the groups of the others do not "
            f"contain it: it takes no part in their collectives. Ask `if not fabric.incarnation:` before them; "
            f"modes async and bounded let it rejoin"
        )

    def post(self, sends: Messages, receives: Messages) -> Pending:
        self.refuse()

    def channel(self, open_channel: Callable[[str], Channel]) -> Channel:
        self.refuse()

    def connect(self, ranks: tuple[int, ...], name: str) -> Transport:
        """All ranks again, to rejoin at other places."""
        if ranks != tuple(range(self.world)):
            self.refuse()
        return ReplacementTransport(self.name, self.rank, self.world, self.incarnation, self.deadlines)

    def close(self, drain: bool) -> None:
        """Nothing is held."""
