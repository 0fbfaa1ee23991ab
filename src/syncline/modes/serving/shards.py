"""Who serves, who works, and which server has which buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from syncline.errors import ConfigError


@dataclass(frozen=True)
class Roles:
    """The ranks by what they do; one may do both."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]

    @classmethod
    def of(cls, world: int, servers: int, apart: bool) -> Roles:
        """The first ranks serve beside their work, or the last ones do nothing else."""
        if not apart:
            if servers > world:
                raise ConfigError(f"servers={servers} are more than {world} ranks; try servers={world}")
            return cls(tuple(range(servers)), tuple(range(world)))
        if servers >= world:
            raise ConfigError(f"servers={servers} of {world} ranks leave no worker; start {servers + 1} ranks or more")
        return cls(tuple(range(world - servers, world)), tuple(range(world - servers)))

    def pairs(self, rank: int) -> list[tuple[int, int]]:
        """Every pair of a server and a worker that a rank belongs to, in an order that is the same on both sides."""
        return [(server, worker) for server in self.servers for worker in self.workers if rank in (server, worker)]


def deal(nbytes: Sequence[int], servers: Sequence[int]) -> dict[int, int]:
    """The server of every bucket: the largest first, each to the server that has least."""
    load = dict.fromkeys(servers, 0)
    placed: dict[int, int] = {}
    for number in sorted(range(len(nbytes)), key=lambda at: (-nbytes[at], at)):
        least = min(servers, key=lambda server: (load[server], server))
        placed[number] = least
        load[least] += nbytes[number]
    return placed


def merged(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all servers have for a checkpoint, as one."""
    optimizers: list[dict[str, Any]] = [{} for _ in shards[0]["optimizers"]]
    for shard in shards:
        for one, other in zip(optimizers, shard["optimizers"], strict=True):
            one |= other
    return {
        "version": max(shard["version"] for shard in shards),
        "parameters": {name: value for shard in shards for name, value in shard["parameters"].items()},
        "optimizers": optimizers,
    }
