"""Replicas that should be equal, compared bit by bit.

Every tensor is hashed with the place of every byte (sums and exclusive ors would cancel), the hashes are gathered, and
the first tensor that differs is named with the ranks that stand alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.core.ranks import some_ranks
from syncline.errors import ReplicasDiverged
from syncline.fabric.base import Fabric
from syncline.replicas import all_have, gather_texts

Named = Sequence[tuple[str, Tensor]]


def compare_replicas(fabric: Fabric, named: Named, state: Named, when: str, touched: bool = False) -> bool:
    """Raise `ReplicasDiverged` on every rank unless all have the same bits; `state` may be kept in parts, one a rank.

    Whether it is. A rank that has `touched` its replica outside the optimizer's step is named.
    """
    names = [name for name, _ in named]
    is_sharded = compare_names(fabric, names, [name for name, _ in state], when)
    compared = [*named, *([] if is_sharded else state)]
    digests = [int(touched), *(digest_of(tensor) for _, tensor in compared)]
    gathered = fabric.all_gather(torch.tensor(digests, dtype=torch.int64, device=fabric.device)).tolist()
    touchers = [rank for rank, row in enumerate(gathered) if row[0]]
    columns = [list(column) for column in zip(*gathered, strict=True)][1:]
    for (name, _), column in zip(compared, columns, strict=True):
        if len(set(column)) > 1:
            raise ReplicasDiverged(difference(name, column, when, columns, touchers))
    return is_sharded


def compare_names(fabric: Fabric, names: Sequence[str], state: Sequence[str], when: str) -> bool:
    """Ranks must have the same tensors before these can be compared; whether each has its own part of the state."""
    text = "\n".join([*names, *state])
    if all_have(fabric, text):
        return False
    lists = [theirs.splitlines() for theirs in gather_texts(fabric, text)]
    if are_shards([set(theirs) - set(names) for theirs in lists]):
        return True
    everywhere = set.intersection(*map(set, lists))
    first = next(name for theirs in lists for name in theirs if name not in everywhere)
    column = [int(first in theirs) for theirs in lists]
    total = len({name for theirs in lists for name in theirs} - everywhere)
    raise ReplicasDiverged(difference(f"{first}, which some do not have,", column, when, [column] * total))


def are_shards(parts: Sequence[set[str]]) -> bool:
    """Whether several ranks have something, and what one has no other one has."""
    return sum(map(bool, parts)) > 1 and sum(map(len, parts)) == len(set.union(*parts))


def digest_of(tensor: Tensor) -> int:
    """63 bits that depend on every bit and its place."""
    digest = hashlib.blake2b(digest_size=8)
    for part in strided_parts(tensor.detach()):
        data = part.cpu().contiguous().view(-1)
        digest.update(data.view(torch.uint8).numpy().data if data.numel() else b"")
    return int.from_bytes(digest.digest(), "big") >> 1


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """A tensor itself, or the indices and values of one that is sparse, as SGD has momenta of sparse gradients."""
    if not tensor.is_sparse:
        return [tensor]
    coalesced = tensor.coalesce()
    return [coalesced.indices(), coalesced.values()]


def difference(
    name: str, column: Sequence[int], when: str, columns: Sequence[Sequence[int]], touchers: Sequence[int] = ()
) -> str:
    """Who stands alone, how much differs, and who is known to have changed something."""
    usual, votes = Counter(column).most_common(1)[0]
    alone = [rank for rank, digest in enumerate(column) if digest != usual]
    differing = sum(len(set(column)) > 1 for column in columns)
    if 2 * votes > len(column):
        who = f"on {some_ranks(alone)} it is not what the others have"
    else:
        who = "there is no majority to say which rank is wrong"
    if touchers:
        who += (
            f"; since the last step {some_ranks([*touchers])} loaded a state, or changed parameters or optimizer state "
            f"in place"
        )
    return (
        f"replicas differ {when}: {name} is the first of {differing} tensors of {len(columns)} that do; {who}. "
        f"Look for a state that not all ranks loaded, for randomness that is not seeded alike, for parameters changed "
        f"outside the optimizer, or for a rank that stepped alone"
    )
