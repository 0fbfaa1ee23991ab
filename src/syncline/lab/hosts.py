"""Several hosts on this machine: network namespaces on a bridge, with a limit on every link in both directions.

Needs root and iproute2. Traffic stays inside this machine, and everything is removed at the end.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from syncline.errors import ConfigError, SynclineError
from syncline.fabric.deadlines import Deadlines
from syncline.launch.torch import TorchProcesses

if TYPE_CHECKING:
    from syncline.fabric.base import Fabric
    from syncline.launch.processes import Join, Life

BRIDGE = "slbridge"
SUBNET = "10.78.0"
DEVICE = "eth0"  # of every host
PATIENCE_S = 0.0  # until another run on this machine has ended


def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if os.geteuid():
        return "it needs root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "it needs iproute2 (on Debian: apt-get install iproute2)"
    return ""


@contextmanager
def hosts(count: int, rate: str) -> Iterator[Hosts]:
    """Make hosts with links of this rate, as tc writes it: `100mbit`, `1gbit`."""
    if reason := why_not():
        raise ConfigError(f"hosts cannot be emulated here: {reason}")
    made = Hosts(count)
    with only_user():
        try:
            made.up(rate)
            yield made
        finally:
            made.down()


@contextmanager
def only_user() -> Iterator[None]:
    """There is one set of hosts, and making them begins with removing what a run that was killed has left."""
    with Path("/run/syncline-hosts.lock").open("w") as file:
        if not locked_within(file, PATIENCE_S):
            raise ConfigError("emulated hosts are in use by another run on this machine; wait for its end")
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do, where a process that was forked has it open too


def locked_within(file: IO[str], patience_s: float) -> bool:
    """Whether the file could be locked, which is tried for so long, and once at least."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.1)
        else:
            return True


class Hosts:
    """Hosts that are there."""

    def __init__(self, count: int) -> None:
        self.count = count

    def up(self, rate: str) -> None:
        """Make them."""
        self.down()
        call("ip", "link", "add", BRIDGE, "type", "bridge")
        call("ip", "link", "set", BRIDGE, "up")
        for number in range(self.count):
            name, end = self.name(number), f"slink{number}"
            call("ip", "netns", "add", name)
            call("ip", "link", "add", end, "type", "veth", "peer", "name", DEVICE, "netns", name)
            call("ip", "link", "set", end, "master", BRIDGE, "up")
            call("ip", "-n", name, "addr", "add", f"{SUBNET}.{number + 1}/24", "dev", DEVICE)
            call("ip", "-n", name, "link", "set", DEVICE, "up")
            call("ip", "-n", name, "link", "set", "lo", "up")
        self.limit(rate)

    def limit(self, rate: str) -> None:
        """Change the rate of all links."""
        shape = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "20ms"]
        for number in range(self.count):
            call("ip", "netns", "exec", self.name(number), "tc", "qdisc", "replace", "dev", DEVICE, *shape)
            call("tc", "qdisc", "replace", "dev", f"slink{number}", *shape)

    def run(self, command: Sequence[str], port: int, limit_s: float) -> str:
        """A rank on every host at once, as torchrun would start it; returns what the first prints."""
        running = [self.start(number, command, port) for number in range(self.count)]
        try:
            outputs = [process.communicate(timeout=limit_s) for process in running]
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        for process, (_, errors) in zip(running, outputs, strict=True):
            if process.returncode:
                raise SynclineError(f"{' '.join(command)} failed: {errors.strip()[-1500:]}")
        return outputs[0][0]

    def start(self, number: int, command: Sequence[str], port: int) -> subprocess.Popen[str]:
        """One rank."""
        environment = {
            **os.environ,
            "RANK": str(number),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": f"{SUBNET}.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
        }
        whole = ["ip", "netns", "exec", self.name(number), *command]
        return subprocess.Popen(whole, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def down(self) -> None:
        """Remove them; those that are not there are passed over."""
        for number in range(64):
            if subprocess.run(["ip", "netns", "del", self.name(number)], capture_output=True, check=False).returncode:
                break
        for number in range(self.count):  # a namespace takes its links with it, but later
            subprocess.run(["ip", "link", "del", f"slink{number}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)

    @staticmethod
    def name(number: int) -> str:
        """Of a namespace."""
        return f"slhost{number}"


def call(*command: str) -> None:
    """One change; an error says which failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SynclineError(f"{' '.join(command)} failed: {done.stderr.strip()}")


@dataclass(frozen=True)
class OnHosts:
    """A setup for `run_processes`: a rank on each of the hosts that are there. None has to import torch by itself."""

    def prepare(self, world: int) -> tuple[Join, Callable[[], None]]:
        """They meet in a file, and talk over their links."""
        join, clean_up = TorchProcesses(deadlines=Deadlines(60.0, join=60.0)).prepare(world)
        return JoinOnHost(join), clean_up


@dataclass(frozen=True)
class JoinOnHost:
    """How one rank joins: it moves to its host first."""

    join: Join

    def __call__(self, rank: int, world: int, life: Life) -> Fabric:
        """Before it has any socket."""
        move_to(Hosts.name(rank))
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        return self.join(rank, world, life)


def move_to(namespace: str) -> None:
    """This thread, and all that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), 0):
            raise SynclineError(f"cannot move to the network namespace {namespace}: {os.strerror(ctypes.get_errno())}")
