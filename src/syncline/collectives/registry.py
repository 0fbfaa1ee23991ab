"""Every all-reduce algorithm by name, and the choice of one."""

from __future__ import annotations

from functools import lru_cache

from syncline.collectives.flat import FLAT, Algorithm
from syncline.collectives.hierarchical import Hierarchical
from syncline.collectives.schedule import Hosts, Schedule
from syncline.specs import parse

ALGORITHMS: dict[str, type[Algorithm]] = {**FLAT, Hierarchical.name: Hierarchical}

HEARD_AT_ONCE_BYTES = 64 << 10  # of a buffer that all ranks may send to each other at the same time, over a network
HARDLY_DEARER = 1.1


@lru_cache(maxsize=512)
def algorithm(text: str) -> Algorithm:
    """The algorithm that `text` describes: `"ring"`, `"tree:arity=4"`, `"hierarchical:inner=ring,outer=tree"`."""
    return parse("collective", text, ALGORITHMS)


@lru_cache(maxsize=512)
def schedule_of(text: str, world: int, hosts: Hosts = ()) -> Schedule:
    """The schedule of the algorithm that `text` describes, built once."""
    return algorithm(text).schedule(world, hosts)


@lru_cache(maxsize=4096)
def cheapest(nbytes: int, world: int, hosts: Hosts, latency_s: float, bytes_per_s: float) -> str:
    """The algorithm with the least rounds * latency + bytes / bandwidth, counted from its schedule.

    With several hosts only hierarchical is asked for large buffers: it is the one that sends least between them. Where
    every rank has a host of its own, only short buffers go directly: all others would fill the queue of a rank's link
    at once, and what does not fit into that is lost and sent again. A ring that is hardly dearer is taken then: it has
    one sender for each link throughout.
    """

    def seconds(name: str) -> float:
        cost = schedule_of(name, world, hosts).cost
        return cost.rounds * latency_s + float(cost.sent) * nbytes / bytes_per_s

    if len(hosts) > 1 and any(len(host) > 1 for host in hosts):
        candidates = ["halving-doubling", "hierarchical"]
    elif len(hosts) > 1 and nbytes > HEARD_AT_ONCE_BYTES:
        return "ring" if seconds("ring") < HARDLY_DEARER * seconds("halving-doubling") else "halving-doubling"
    else:
        candidates = ["ring", "halving-doubling", "direct"]
    return min(candidates, key=seconds)
