"""Which ranks share a host.

Host names lie: containers share them, clones share them. Ranks are on one host when they run under the same boot of the
same kernel and in the same network, IPC and mount namespaces. `SYNCLINE_HOST` overrides it, for emulation.
"""

from __future__ import annotations

import os
import socket
import zlib
from pathlib import Path


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
