"""Every schedule by name, all-reduce or not: for showing and documenting them."""

from __future__ import annotations

from syncline.collectives.all_gather import all_gather
from syncline.collectives.all_to_all import all_to_all
from syncline.collectives.broadcast import broadcast
from syncline.collectives.reduce_scatter import reduce_scatter
from syncline.collectives.registry import ALGORITHMS, schedule_of
from syncline.collectives.schedule import Hosts, Schedule
from syncline.errors import ConfigError, UnknownName

OTHERS = {"reduce-scatter": reduce_scatter, "all-gather": all_gather, "all-to-all": all_to_all}


def names() -> list[str]:
    """All of them."""
    return [*ALGORITHMS, *OTHERS, "broadcast"]


def by_name(text: str, world: int, hosts: Hosts = (), root: int = 0) -> Schedule:
    """The schedule that `text` names, with settings where it has any."""
    name = text.partition(":")[0]
    if name not in names():
        raise UnknownName("algorithm", name, names())
    if name == "broadcast":
        if root not in range(world):
            raise ConfigError(f"root {root} is not a rank of this world; ranks are 0..{world - 1}")
        return broadcast(world, root)
    if name in OTHERS:
        return OTHERS[name](world)
    return schedule_of(text, world, hosts)
