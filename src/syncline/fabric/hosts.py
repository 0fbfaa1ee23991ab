"""Which ranks share a host.

Host names lie: containers share them, clones share them. Ranks are on one host when they run under the same boot of the
same kernel and in the same network, IPC and mount namespaces. `SYNCLINE_HOST` overrides it, for emulation.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Sequence
from pathlib import Path

from syncline.collectives.schedule import Hosts


def host_key() -> int:
    """A number that is the same on ranks that share a host."""
    if name := os.environ.get("SYNCLINE_HOST"):
        return digest(name)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("net", "ipc", "mnt")]
    except OSError:
        return digest(socket.gethostname())
    return digest(" ".join([boot, *spaces]))


def digest(text: str) -> int:
    """63 bits of it, so that it fits an int64."""
    data = text.encode()
    return (zlib.crc32(data) << 31) ^ zlib.crc32(data[::-1])


def hosts_among(hosts: Hosts, ranks: Sequence[int]) -> Hosts:
    """The hosts of some ranks, which are counted anew in the order given."""
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    return group_by_host([host_of[rank] for rank in ranks])


def group_by_host(keys: Sequence[int]) -> Hosts:
    """The ranks of each host, hosts in the order of their first rank."""
    hosts: dict[int, list[int]] = {}
    for rank, key in enumerate(keys):
        hosts.setdefault(key, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())
