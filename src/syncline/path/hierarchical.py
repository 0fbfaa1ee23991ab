"""Codecs between hosts only: `collective="hierarchical"` with a codec.

    host A: 0 1     sum inside        in full precision
    host B: 2 3 4   across hosts      0 <-> 2 talk about the sums of their hosts, through the codec
                    spread inside     0 tells 1, 2 tells 3 and 4

The first rank of a host is its leader. It weighs the sum of its host by H / W, for H hosts of W ranks, so that the mean
over leaders is the mean over ranks, whatever the sizes of the hosts. What was not sent is left with the leader in the
weight of a rank: the mean over all ranks of their residuals is what is missing, as it is where all ranks talk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from syncline.codecs.codec import Codec, ReduceContext, State
from syncline.codecs.conversation import Conversation, Question
from syncline.collectives.hierarchical import Hierarchical
from syncline.errors import FabricError, PeerError
from syncline.fabric.base import Fabric
from syncline.path.answerer import Answerer, Asked, FlatAnswerer, prepare_means_of_halves
from syncline.path.stages import Route, Stage


class HierarchicalAnswerer(Answerer):
    """Leaders talk for their hosts, one bucket after the other. All ranks make it together."""

    waits = True

    def __init__(self, fabric: Fabric, chosen: Hierarchical, codec: Codec) -> None:
        hosts = chosen.placed(fabric.world, fabric.hosts)
        self.fabric = fabric
        self.inner, outer = best_of(chosen)
        self.weight = len(hosts) / fabric.world
        host_ranks = next(host for host in hosts if fabric.rank in host)
        leader_ranks = tuple(host[0] for host in hosts)
        self.host = fabric.subgroup(host_ranks)
        self.leaders = fabric.subgroup(leader_ranks) if fabric.rank in leader_ranks else None
        self.among_leaders = None if self.leaders is None else FlatAnswerer([self.leaders.channel()], outer)
        if self.among_leaders is not None:
            prepare_means_of_halves([*self.among_leaders.channels] * codec.most_questions, codec)
        of_halves = "direct" if self.among_leaders is None else self.among_leaders.route.collective_of_halves
        self.route = Route(fabric.world, fabric.rank, hosts, outer, of_halves)

    def add_up(self, values: Tensor) -> None:
        """Replace the values of every rank of a host by their sum."""
        with self._one_culprit():
            self.host.all_reduce(values, op="sum", collective=self.inner)

    def begin(self, codec: Codec, values: Tensor, state: State, context: ReduceContext) -> Conversation:
        """Talk for the host, and leave what was not sent."""
        assert self.leaders is not None
        values.mul_(self.weight)
        context = replace(context, rank=self.leaders.rank, world=self.leaders.world)
        decoder = yield from codec.reduce(values, state, context)
        values.div_(self.weight)
        return decoder

    def ask(self, question: Question, stage: Stage) -> Asked:
        """The answer of the other leaders, waited for."""
        assert self.among_leaders is not None
        with self._one_culprit():
            asked = self.among_leaders.ask(question, stage._replace(number=0))
            asked.handle.wait()
        return asked

    def spread(self, mean: Tensor) -> None:
        """Give every rank of a host what its leader has."""
        with self._one_culprit():
            self.host.broadcast(mean)

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
