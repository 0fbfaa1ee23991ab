"""Rejoining on shared memory: an endpoint is a local socket with a secret name, and a request is a datagram to it."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

from syncline.core.group import Group
from syncline.errors import JoinFailed
from syncline.fabric.base import Fabric
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.membership import Membership, RejoinAttempt, RejoinEndpoint, RejoinRequest
from syncline.fabric.shm import Meeting, ShmTransport

CREDENTIALS = struct.Struct("iii")  # process, user, group: the kernel tells who sent a datagram
REQUEST = struct.Struct("ii")
ACCEPTED = b"accepted"


class ShmMembership(Membership):
    """Membership of the ranks that met in one place."""

    def __init__(self, meeting: Meeting, deadlines: Deadlines) -> None:
        self.meeting = meeting
        self.deadlines = deadlines

    def endpoint(self, place: str) -> ShmEndpoint:
        return ShmEndpoint(self, place)

    def attempt(self, place: str, request: RejoinRequest) -> ShmAttempt:
        return ShmAttempt(self.address(place), request)

    def pair(self, place: str, request: RejoinRequest, rank: int) -> Fabric:
        meeting = self.meeting.aside(f"{request} at {place}")
        return Fabric(ShmTransport(meeting, rank, Group.on_hosts([0, 0]), self.meeting_deadlines()))

    def address(self, place: str) -> str:
        """A name in the abstract namespace: gone with the process."""
        return self.meeting.aside(f"the endpoint of {place}").address.replace("@", "\0", 1)


class ShmEndpoint(RejoinEndpoint):
    """The socket of one rank."""

    def __init__(self, membership: ShmMembership, place: str) -> None:
        self.membership = membership
        self.place = place
        self.socket = new_socket()
        self.socket.bind(membership.address(place))
        self.senders: dict[RejoinRequest, str | bytes] = {}

    def poll(self) -> RejoinRequest | None:
        """The next request of this user: names of local sockets can be seen by everyone, so others may send as well."""
        try:
            data, about, _, sender = self.socket.recvmsg(REQUEST.size, socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            return None
        users = [CREDENTIALS.unpack(one)[1] for _, kind, one in about if kind == socket.SCM_CREDENTIALS]
        if users != [os.geteuid()] or len(data) != REQUEST.size:
            return None
        request = RejoinRequest(*REQUEST.unpack(data))
        self.senders[request] = sender
        return request

    def accept(self, request: RejoinRequest) -> Fabric:
        try:
            self.socket.sendto(ACCEPTED, self.senders.pop(request))
        except OSError as error:
            raise JoinFailed(f"rank {request.rank} has asked to rejoin, and is gone: {error}") from error
        return self.membership.pair(self.place, request, 0)

    def close(self) -> None:
        self.socket.close()


class ShmAttempt(RejoinAttempt):
    """The socket of a replacement worker."""

    def __init__(self, address: str, request: RejoinRequest) -> None:
        self.address = address
        self.message = REQUEST.pack(*request)
        self.answer = b""
        self.socket = new_socket()
        self.socket.bind("")  # the kernel finds a name

    def can_ask(self) -> bool:
        with new_socket() as probe, suppress(OSError):
            probe.connect(self.address)
            return True
        return False

    def ask(self) -> None:
        try:
            self.socket.sendto(self.message, self.address)
        except OSError as error:
            raise JoinFailed(f"its endpoint cannot be reached: {error}") from error

    def is_accepted(self) -> bool:
        with suppress(BlockingIOError):
            self.answer = self.answer or self.socket.recv(len(ACCEPTED))
        return self.answer == ACCEPTED

    def close(self) -> None:
        self.socket.close()


def new_socket() -> socket.socket:
    """A socket for datagrams, without waiting; the kernel says who sends them."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return made
