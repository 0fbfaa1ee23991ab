"""Errors: a tree split by what the caller can do, messages that help, and a way between processes."""

from __future__ import annotations

import pickle

import pytest

from syncline import errors
from syncline.errors import (
    ConfigError,
    Desync,
    FabricError,
    PeerError,
    PeerLost,
    PeerStalled,
    RankFailed,
    ScheduleError,
    SynclineError,
    UnknownName,
)
from syncline.fabric.health import peer_error
from syncline.launch.failures import Failure, ProcessEnded, ProcessStopped, rank_failed


def every_error() -> list[type[SynclineError]]:
    """All classes of errors.py."""
    return [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, SynclineError)]


def test_the_tree_is_as_it_is_drawn() -> None:
    drawn = [line.split()[0] for line in errors.__doc__.splitlines()[2:] if line.strip()]
    assert set(drawn) == {cls.__name__ for cls in every_error()} - {"PeerError"}


def test_the_tree_is_split_by_what_the_caller_can_do() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(UnknownName, ConfigError)
    assert all(issubclass(cls, FabricError) for cls in (PeerLost, PeerStalled, Desync))
    assert not issubclass(ScheduleError, FabricError)
    assert not issubclass(RankFailed, FabricError)


def test_everything_raised_on_purpose_has_one_root() -> None:
    raised = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)]
    assert all(issubclass(cls, SynclineError) for cls in raised)


# Unknown names


@pytest.mark.parametrize(
    ("name", "near"),
    [("rign", ["ring"]), ("ring ", ["ring"]), ("trees", ["tree", "threads"]), ("directly", ["direct"])],
)
def test_near_names_are_offered(name: str, near: list[str]) -> None:
    error = UnknownName("thing", name, ["ring", "tree", "threads", "direct"])
    assert error.near[: len(near)] == near[: len(error.near)]
    assert str(error) == f"unknown thing {name!r}; did you mean {' or '.join(error.near)}?"


def test_where_nothing_is_near_all_are_told() -> None:
    assert str(UnknownName("thing", "xyzzy", ["b", "a"])) == "unknown thing 'xyzzy'; known: a, b"


# Between processes

EXAMPLES = [
    ConfigError("ranks=0 is less than 1; try ranks=2"),
    UnknownName("collective", "rign", ["ring", "tree"]),
    PeerLost(3, "rank 3 is gone"),
    PeerStalled(2, "rank 2 did not arrive"),
    Desync("ranks differ"),
    ScheduleError("wrong"),
    ProcessEnded(1, -9),
    ProcessStopped(1),
    rank_failed([Failure(1, ValueError("no"), "Traceback", 0)], {0: "result"}),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_being_sent_to_another_process(error: SynclineError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert comparable(arrived) == comparable(error)


def comparable(error: SynclineError) -> dict[str, str]:
    """The attributes of an error."""
    return {name: repr(value) for name, value in vars(error).items()}


# Messages


@pytest.mark.parametrize("kind", ["lost", "stalled"])
def test_a_failed_peer_is_named_with_what_was_done_and_how_long(kind: str) -> None:
    error = peer_error(kind, 3, 1, "all_reduce(sum, float32[10], ring)", 2.5)
    assert isinstance(error, PeerError)
    assert error.rank == 3
    for part in ("rank 3", "during all_reduce(sum, float32[10], ring)", "noticed by rank 1", "2.5 s"):
        assert part in str(error)


def test_the_next_thing_to_try_is_in_the_message() -> None:
    assert "Look at what it printed last" in str(peer_error("lost", 0, 1, "barrier()", 0.0))
    assert "give Deadlines a longer operation time" in str(peer_error("stalled", 0, 1, "barrier()", 0.0))


def failure(rank: int, error: BaseException, order: int) -> Failure:
    return Failure(rank, error, f"Traceback of {rank}\n", order)


def test_whoever_only_suffered_comes_last() -> None:
    suffered, guilty = failure(0, PeerLost(1, "rank 1 is gone"), 0), failure(1, ValueError("no"), 1)
    error = rank_failed([suffered, guilty], {2: "fine"})
    assert list(error.failures) == [1, 0]
    assert error.results == {2: "fine"}
    assert str(error) == ("rank 1 failed first:\n\nTraceback of 1\n\nafter that:\n  rank 0: PeerLost: rank 1 is gone")


def test_among_equals_the_first_to_be_noticed_comes_first() -> None:
    failures = [failure(rank, ValueError(rank), order) for rank, order in [(0, 2), (1, 0), (2, 1)]]
    assert list(rank_failed(failures, {}).failures) == [1, 2, 0]


def test_one_failure_alone_has_nothing_after_it() -> None:
    assert str(rank_failed([failure(4, ValueError("no"), 0)], {})) == "rank 4 failed first:\n\nTraceback of 4"


@pytest.mark.parametrize(
    ("exit_code", "message"),
    [
        (-9, "the process of rank 2 was ended by SIGKILL"),
        (-11, "the process of rank 2 was ended by SIGSEGV"),
        (3, "the process of rank 2 exited with code 3 before it had a result"),
        (0, "the process of rank 2 exited with code 0 before it had a result"),
    ],
)
def test_how_a_process_ended(exit_code: int, message: str) -> None:
    assert str(ProcessEnded(2, exit_code)) == message
