"""A group: who takes part in a run, and which of them share a host. It never changes; what changes a run makes another.

A member keeps its identity when ranks are counted anew: its rank is its place among the members, and no more than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from syncline.core.ranks import some_ranks
from syncline.errors import ConfigError


@dataclass(frozen=True)
class Member:
    """One process that takes part."""

    identity: str  # no other member of the run ever has it
    host: int  # the same number on members that share a host


@dataclass(frozen=True)
class Group:
    """Members in the order of their ranks."""

    members: tuple[Member, ...]
    epoch: int = 0  # how often members have left or joined

    @classmethod
    def on_hosts(cls, keys: Sequence[int]) -> Group:
        """The first group of a run; `keys` are equal for ranks that share a host."""
        return cls(tuple(Member(f"rank {rank}", key) for rank, key in enumerate(keys)))

    @property
    def world(self) -> int:
        """The number of members."""
        return len(self.members)

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, hosts in the order of their first rank."""
        hosts: dict[int, list[int]] = {}
        for rank, member in enumerate(self.members):
            hosts.setdefault(member.host, []).append(rank)
        return tuple(tuple(ranks) for ranks in hosts.values())

    def rank_of(self, identity: str) -> int | None:
        """The rank of a member; None if it takes no part."""
        return next((rank for rank, member in enumerate(self.members) if member.identity == identity), None)

    def among(self, ranks: Iterable[int]) -> Group:
        """Some of the members, in the order given; who takes part in the run stays the same."""
        return replace(self, members=tuple(self.members[rank] for rank in ranks))

    def without(self, ranks: Iterable[int]) -> Group:
        """The group after these ranks have left: the others close up."""
        gone = set(ranks)
        if beyond := gone - set(range(self.world)):
            raise ConfigError(f"{some_ranks(sorted(beyond))} cannot leave: ranks are 0..{self.world - 1}")
        if len(gone) == self.world:
            raise ConfigError("all ranks cannot leave: a group has at least one member; end the run instead")
        stay = self.among(rank for rank in range(self.world) if rank not in gone)
        return replace(stay, epoch=self.epoch + 1)

    def joined_by(self, member: Member) -> Group:
        """The group after a member has come, whose rank is the last one."""
        if self.rank_of(member.identity) is not None:
            raise ConfigError(f"{member.identity} takes part already; a member that joins needs an identity of its own")
        return Group((*self.members, member), self.epoch + 1)
