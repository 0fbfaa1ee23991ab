"""The group: members keep their identities when ranks are counted anew."""

from __future__ import annotations

import pytest

from syncline.core.group import Group, Member
from syncline.errors import ConfigError

FIVE = Group.on_hosts([7, 3, 7, 7, 5])


def identities(group: Group) -> list[str]:
    return [member.identity for member in group.members]


def test_hosts_are_in_the_order_of_their_first_rank() -> None:
    assert FIVE.hosts == ((0, 2, 3), (1,), (4,))
    assert (FIVE.world, FIVE.epoch) == (5, 0)


def test_those_who_stay_close_up_and_keep_their_identities_and_hosts() -> None:
    left = FIVE.without([0, 3])
    assert identities(left) == ["rank 1", "rank 2", "rank 4"]
    assert left.hosts == ((0,), (1,), (2,))
    assert [left.rank_of(identity) for identity in ("rank 4", "rank 0")] == [2, None]
    assert (left.epoch, FIVE.epoch, FIVE.world) == (1, 0, 5)


def test_one_that_joins_is_the_last_and_shares_its_host() -> None:
    joined = FIVE.without([1]).joined_by(Member("new", 5))
    assert identities(joined) == ["rank 0", "rank 2", "rank 3", "rank 4", "new"]
    assert joined.hosts == ((0, 1, 2), (3, 4))
    assert joined.epoch == 2


def test_some_of_a_group_are_in_the_order_given_and_nobody_has_left() -> None:
    some = FIVE.among([3, 1])
    assert identities(some) == ["rank 3", "rank 1"]
    assert (some.hosts, some.epoch) == (((0,), (1,)), 0)


@pytest.mark.parametrize("ranks", [[5], [-1, 2]])
def test_a_rank_that_is_not_there_cannot_leave(ranks: list[int]) -> None:
    with pytest.raises(ConfigError, match=rf"rank {ranks[0]} cannot leave: ranks are 0\.\.4"):
        FIVE.without(ranks)


def test_all_cannot_leave() -> None:
    with pytest.raises(ConfigError, match="at least one member"):
        FIVE.without(range(5))


def test_an_identity_is_of_one_member() -> None:
    with pytest.raises(ConfigError, match="rank 2 takes part already"):
        FIVE.joined_by(Member("rank 2", 0))
