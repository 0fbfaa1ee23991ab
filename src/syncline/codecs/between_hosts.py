"""Codecs between hosts only: `collective="hierarchical"` with a codec.

    host A: 0 1     sum inside        in full precision
    host B: 2 3 4   across hosts      0 <-> 2 talk about the sums of their hosts, through the codec
                    spread inside     0 tells 1, 2 tells 3 and 4

The first rank of a host is its leader. It weighs the sum of its host by H / W, for H hosts of W ranks, so that the mean
over leaders is the mean over ranks, whatever the sizes of the hosts. What was not sent is left with the leader in the
weight of a rank: the mean over all ranks of what they keep is what is missing, as it is where all ranks talk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from syncline.codecs.answers import Alone, AmongAll, converse
from syncline.codecs.codec import Codec, Place, State
from syncline.codecs.conversation import Decoder
from syncline.codecs.none import void
from syncline.collectives.hierarchical import Hierarchical
from syncline.collectives.registry import algorithm
from syncline.errors import FabricError, PeerError
from syncline.fabric.base import Fabric


def talk_on(fabric: Fabric, collective: str) -> Alone | AmongAll | BetweenHosts:
    """Who takes part in the conversations of a codec: all ranks, or with `"hierarchical"` one of each host."""
    if fabric.world == 1:
        return Alone()
    chosen = None if collective in ("auto", "engine") else algorithm(collective)
    return BetweenHosts(fabric, chosen) if isinstance(chosen, Hierarchical) else AmongAll(fabric, collective)


class BetweenHosts:
    """Leaders talk for their hosts. All ranks make it together."""

    def __init__(self, fabric: Fabric, chosen: Hierarchical) -> None:
        hosts = chosen.placed(fabric.world, fabric.hosts)
        self.fabric = fabric
        self.inner, self.outer = best_of(chosen)
        self.weight = len(hosts) / fabric.world
        self.host_ranks = next(host for host in hosts if fabric.rank in host)
        self.leader_ranks = tuple(host[0] for host in hosts)
        self.host = fabric.subgroup(self.host_ranks)
        self.leaders = fabric.subgroup(self.leader_ranks) if fabric.rank in self.leader_ranks else None

    def collect(self, values: Tensor) -> None:
        """Before the codec is asked: the sum of the host."""
        with self._one_culprit():
            self.host.all_reduce(values, op="sum", collective=self.inner)

    def carry(self, codec: Codec, values: Tensor, state: State, place: Place) -> tuple[Decoder, int]:
        """Carry a conversation through; returns what writes the mean, and the bytes that were said to other hosts."""
        mean = torch.empty_like(values)
        said = 0
        with self._one_culprit():
            if self.leaders is None:
                values.zero_()
                state.clear()
            else:
                said = self._lead(self.leaders, codec, values, state, place, mean)
            self.host.broadcast(mean)
        return lambda out: void(out.copy_(mean)), said

    def _lead(self, leaders: Fabric, codec: Codec, values: Tensor, state: State, place: Place, mean: Tensor) -> int:
        """Talk for the host, write the mean, and leave what was not sent."""
        values.mul_(self.weight)
        place = replace(place, rank=leaders.rank, world=leaders.world)
        decoder, said = converse(codec.reduce(values, state, place), leaders, self.outer)
        decoder(mean)
        values.div_(self.weight)
        return said

    @contextmanager
    def _one_culprit(self) -> Iterator[None]:
        """A subgroup knows of its members only: those who wait in others are woken, and all ranks look for it together.

        Not where this rank itself is closing the fabric.
        """
        groups = [group for group in (self.host, self.leaders) if group is not None]
        try:
            yield
        except PeerError as error:
            if any(group.is_closed for group in groups):
                raise
            for group in groups:
                group.close(drain=False)
            self.fabric.barrier()
            raise FabricError(f"a bucket was given up, although all ranks are here again: {error}") from error


def best_of(chosen: Hierarchical) -> tuple[str, str]:
    """The algorithms inside and across that were asked for; those that were not are the fabric's choice."""
    usual = Hierarchical()
    return (
        "auto" if chosen.inner == usual.inner else chosen.inner,
        "auto" if chosen.outer == usual.outer else chosen.outer,
    )
