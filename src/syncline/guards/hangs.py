"""Why a bucket did not arrive: who did not send it, what is in it, how far that rank came, and what that suggests."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from syncline.errors import Desync, PeerError, PeerLost
from syncline.fabric.health import RankProgress

SHOWN = 3  # parameter names


class Doing(IntEnum):
    """What a rank is doing, as it publishes with its progress."""

    ELSEWHERE = 0  # the pass is over
    BACKWARD = 1
    FAILED = 2  # an exception ended its backward pass, which it has not completed with the others


def explain(
    error: PeerError, step: int, bucket: int, buckets: Sequence[Sequence[str]], progress: RankProgress, ended: int = 0
) -> PeerError:
    """The same error, with what is known of the rank that is to blame. Buckets are lists of parameter names.

    When a backward pass fails, the buckets that it has not produced are sent with zeros. `ended` is the last step that
    all ranks have ended, by its status: the published progress may not have come so far when its rank died.
    """
    their_step, _, produced, doing = progress
    if their_step < ended or (their_step == ended and doing == Doing.BACKWARD):
        their_step, produced, doing = ended, len(buckets), Doing.ELSEWHERE
    if doing == Doing.FAILED and their_step >= step:
        step, bucket = their_step, min(produced, len(buckets) - 1)
    what = f"bucket {bucket} of step {step} ({some(buckets[bucket])})"
    if their_step > step or (their_step == step and produced > bucket):
        lines = [f"rank {error.rank} sent {what} off, but did not stay until it had arrived everywhere"]
    else:
        lines = [f"rank {error.rank} never produced {what}", last_produced(error.rank, their_step, produced, buckets)]
    lines.append(f"likely: {cause(error, step, their_step, doing, buckets[bucket])}")
    return type(error)(error.rank, "; ".join(lines) + f". [{error.message}]")


def explain_desync(error: Desync, step: int, bucket: int, buckets: Sequence[Sequence[str]]) -> Desync:
    """The same error, with the bucket that this rank was in."""
    return Desync(
        f"{str(error).rstrip('.')}. On this rank it is bucket {bucket} of step {step} ({some(buckets[bucket])})"
    )


def some(names: Sequence[str]) -> str:
    """The first few names."""
    if not names:
        return "no parameters"
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


def last_produced(rank: int, their_step: int, produced: int, buckets: Sequence[Sequence[str]]) -> str:
    """How far it came."""
    if not their_step:
        return f"rank {rank} has produced nothing yet, as far as is known"
    if not produced:
        return f"the last that rank {rank} finished is step {their_step - 1}; of step {their_step} it produced nothing"
    return f"the last it produced is bucket {produced - 1} of step {their_step} ({some(buckets[produced - 1])})"


def cause(error: PeerError, step: int, their_step: int, doing: int, names: Sequence[str]) -> str:
    """The most likely reason."""
    earlier = (
        "it left the loop earlier (fewer batches: use sync.join()), stepped after fewer passes (wrap all but the last "
        "in sync.no_sync())"
    )
    if doing == Doing.FAILED:
        return (
            f"an exception ended its backward pass of step {their_step}, and its loop did not go on; look at what it "
            f"printed"
        )
    if isinstance(error, PeerLost):
        died = "its process died; look at what it printed last, and at the kernel's log for a lack of memory"
        return f"{earlier}, or {died}" if their_step < step else died
    if their_step < step:
        return f"it never began this backward pass: {earlier}, took another branch, or waits for its data"
    if doing == Doing.BACKWARD:
        first = names[0] if names else "the next gradient"
        return f"it is stuck or stopped in its backward pass before {first}, or took a branch that the others did not"
    return "it is stopped, or in a computation that takes longer than the deadline"
