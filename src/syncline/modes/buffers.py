"""Buffers of modules, such as BatchNorm's statistics, made equal. One that is not finite on some ranks does not spread.

A rank may meet a batch that is not finite: its step is skipped, but running statistics have taken the batch in. What
ranks agree on has the same bits everywhere, so all of them see when it is not finite, and only then ask each other
whose buffer is. Where all is well that costs no message.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.core.ranks import some_ranks
from syncline.core.torch_internals import copy_each
from syncline.fabric.base import Fabric
from syncline.guards.finite import first_not_finite, is_finite
from syncline.modes.settings import Buffers
from syncline.replicas import broadcast_tensors

log = logging.getLogger(__name__)
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Hopeless:
    """A buffer that is finite on no rank, as a mask of minus infinity is: nobody is asked for a better one again."""

    agreed: Tensor
    taken: Tensor  # instead


class SettledBuffers:
    """Makes the buffers of ranks equal."""

    def __init__(self) -> None:
        self.hopeless: dict[str, Hopeless] = {}
        self.said: dict[str, list[int]] = {}  # the ranks on which a buffer was not finite the last time

    def settle(self, fabric: Fabric, policy: Buffers, buffers: Named, root: int) -> None:
        """All take those of one rank, or the means of those that have fractions."""
        if policy == "local":
            return
        fractions = {name: real_of(buffer.data) for name, buffer in buffers.items()}
        own = {name: buffer for name, buffer in fractions.items() if buffer.is_floating_point()}
        is_source = policy == "broadcast" and fabric.rank == root
        agreed = dict(own) if is_source else {name: buffer.clone() for name, buffer in own.items()}
        counters = [buffer for name, buffer in buffers.items() if name not in own]
        if policy == "broadcast":
            broadcast_tensors(fabric, [*counters, *agreed.values()], root)
        else:
            broadcast_tensors(fabric, counters, root)
            for buffer in agreed.values():
                fabric.all_reduce(buffer, op="mean")
        self.replace(fabric, policy, own, agreed, root)
        new = [name for name, buffer in own.items() if agreed[name] is not buffer]
        if new:
            copy_each([own[name] for name in new], [agreed[name] for name in new])

    def replace(self, fabric: Fabric, policy: Buffers, own: Named, agreed: Named, root: int) -> None:
        """Take what is not finite from ranks on which it is. All ranks do the same."""
        bad = not_finite(agreed)
        self.hopeless = {
            name: one for name, one in self.hopeless.items() if name in bad and has_same_bits(one.agreed, agreed[name])
        }
        agreed.update({name: one.taken for name, one in self.hopeless.items()})
        asked = [name for name in bad if name not in self.hopeless]
        before, self.said = self.said, {}
        for name, good in zip(asked, finite_on(fabric, [own[name] for name in asked]), strict=True):
            taken = take_from(fabric, policy, own[name], good or [root])
            if not good:
                self.hopeless[name] = Hopeless(agreed[name].clone(), taken)
            agreed[name] = taken
            self.said[name] = [rank for rank in range(fabric.world) if rank not in good]
            if self.said[name] != before.get(name):
                log.warning("%s is not finite on %s: %s", name, some_ranks(self.said[name]), outcome(good, root))


def real_of(buffer: Tensor) -> Tensor:
    """A buffer, or the pairs of real numbers that a complex one is made of."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def not_finite(buffers: Named) -> list[str]:
    """The names of those that have a NaN or an infinity; where none has, they are looked at all at once."""
    if not first_not_finite(buffers.items()):
        return []
    return [name for name, buffer in buffers.items() if not is_finite(buffer)]


def finite_on(fabric: Fabric, buffers: Sequence[Tensor]) -> list[list[int]]:
    """The ranks on which each buffer is finite."""
    if not buffers:
        return []
    mine = torch.tensor([is_finite(buffer) for buffer in buffers], dtype=torch.int64, device=fabric.device)
    return [[rank for rank, good in enumerate(column) if good] for column in fabric.all_gather(mine).T.tolist()]


def take_from(fabric: Fabric, policy: Buffers, own: Tensor, ranks: Sequence[int]) -> Tensor:
    """The mean over some ranks, or what the first of them has."""
    taken = own.clone()
    if policy == "broadcast" or len(ranks) == 1:
        broadcast_tensors(fabric, [taken], ranks[0])
        return taken
    if fabric.rank not in ranks:
        taken.zero_()
    return fabric.all_reduce(taken, op="mean").mul_(fabric.world / len(ranks))


def outcome(good: Sequence[int], root: int) -> str:
    """What became of a buffer that is finite on these ranks."""
    if good:
        return f"all take it from {some_ranks([*good])}"
    return f"no rank has a better one, so that of rank {root} is kept"


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN is NaN here."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
