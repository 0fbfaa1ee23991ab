"""Newcomers on shared memory: a door is a local socket with a name that only the job knows, and a knock a datagram."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import ClassVar

from syncline.errors import JoinFailed
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.newcomers import Door, Doors, Doorstep, Knock, Newcomer
from syncline.fabric.shm import Meeting, ShmFabric

CREDENTIALS = struct.Struct("iii")  # process, user, group: the kernel tells who sent a datagram
KNOCK = struct.Struct("ii")
COME_IN = b"come in"


class ShmNewcomer(Newcomer):
    """A rank that comes later to a group that shares memory."""

    name: ClassVar[str] = "shm"


class ShmDoors(Doors):
    """Of the ranks that met in one place."""

    def __init__(self, meeting: Meeting, deadlines: Deadlines) -> None:
        self.meeting = meeting
        self.deadlines = deadlines

    def open(self, place: str) -> ShmDoor:
        return ShmDoor(self, place)

    def before(self, place: str, knock: Knock) -> ShmDoorstep:
        return ShmDoorstep(self.address(place), knock)

    def pair(self, place: str, knock: Knock, rank: int) -> ShmFabric:
        return ShmFabric(self.meeting.aside(f"{knock} at {place}"), rank, 2, self.greeting())

    def address(self, place: str) -> str:
        """In the abstract namespace: gone with the process."""
        return self.meeting.aside(f"the door of {place}").address.replace("@", "\0", 1)


class ShmDoor(Door):
    """One rank's."""

    def __init__(self, doors: ShmDoors, place: str) -> None:
        self.doors = doors
        self.place = place
        self.bell = new_socket()
        self.bell.bind(doors.address(place))
        self.senders: dict[Knock, str | bytes] = {}

    def look(self) -> Knock | None:
        """Names of local sockets can be seen by everyone, so what another user says is not heard."""
        try:
            data, about, _, sender = self.bell.recvmsg(KNOCK.size, socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            return None
        users = [CREDENTIALS.unpack(one)[1] for _, kind, one in about if kind == socket.SCM_CREDENTIALS]
        if users != [os.geteuid()] or len(data) != KNOCK.size:
            return None
        knock = Knock(*KNOCK.unpack(data))
        self.senders[knock] = sender
        return knock

    def let_in(self, knock: Knock) -> ShmFabric:
        try:
            self.bell.sendto(COME_IN, self.senders.pop(knock))
        except OSError as error:
            raise JoinFailed(f"rank {knock.rank} has knocked, and is gone: {error}") from error
        return self.doors.pair(self.place, knock, 0)

    def close(self) -> None:
        self.bell.close()


class ShmDoorstep(Doorstep):
    """A newcomer's side."""

    def __init__(self, address: str, knock: Knock) -> None:
        self.address = address
        self.message = KNOCK.pack(*knock)
        self.told = b""
        self.bell = new_socket()
        self.bell.bind("")  # the kernel finds a name

    def is_there(self) -> bool:
        with new_socket() as probe, suppress(OSError):
            probe.connect(self.address)
            return True
        return False

    def knock(self) -> None:
        try:
            self.bell.sendto(self.message, self.address)
        except OSError as error:
            raise JoinFailed(f"its door does not open: {error}") from error

    def is_open(self) -> bool:
        with suppress(BlockingIOError):
            self.told = self.told or self.bell.recv(len(COME_IN))
        return self.told == COME_IN

    def close(self) -> None:
        self.bell.close()


def new_socket() -> socket.socket:
    """For datagrams, without waiting; the kernel says who sends them."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return made
