"""Replicas that should be equal, compared bit by bit.

Every tensor is hashed with the place of every byte (sums and exclusive ors would cancel), the hashes are gathered, and
the first tensor that differs is named with the ranks that stand alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from syncline.errors import ReplicasDiverged
from syncline.fabric.base import Fabric
from syncline.replicas import gather_texts


def compare_replicas(fabric: Fabric, named: Iterable[tuple[str, Tensor]], when: str) -> None:
    """Raise `ReplicasDiverged` on every rank unless all have the same bits."""
    names, digests = [], []
    for name, tensor in named:
        names.append(name)
        digests.append(digest_of(tensor))
    compare_names(fabric, names, when)
    gathered = fabric.all_gather(torch.tensor(digests, dtype=torch.int64, device=fabric.device)).tolist()
    columns = [[row[position] for row in gathered] for position in range(len(names))]
    for name, column in zip(names, columns, strict=True):
        if len(set(column)) > 1:
            raise ReplicasDiverged(difference(name, column, when, columns))


def compare_names(fabric: Fabric, names: Sequence[str], when: str) -> None:
    """Ranks must have the same tensors before these can be compared."""
    text = "\n".join(names).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
    rows = fabric.all_gather(torch.tensor([len(names), digest], device=fabric.device)).tolist()
    if len({tuple(row) for row in rows}) == 1:
        return
    lists = [text.splitlines() for text in gather_texts(fabric, "\n".join(names))]
    everywhere = set.intersection(*map(set, lists))
    first = next(name for theirs in lists for name in theirs if name not in everywhere)
    column = [int(first in theirs) for theirs in lists]
    total = len({name for theirs in lists for name in theirs} - everywhere)
    raise ReplicasDiverged(difference(f"{first}, which some do not have,", column, when, [column] * total))


def digest_of(tensor: Tensor) -> int:
    """63 bits that depend on every bit and its place."""
    data = tensor.detach().cpu().contiguous().view(-1)
    content = data.view(torch.uint8).numpy().data if data.numel() else b""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


def difference(name: str, column: Sequence[int], when: str, columns: Sequence[Sequence[int]]) -> str:
    """Who stands alone, and how much differs."""
    usual, votes = Counter(column).most_common(1)[0]
    alone = [rank for rank, digest in enumerate(column) if digest != usual]
    differing = sum(len(set(column)) > 1 for column in columns)
    if 2 * votes > len(column):
        who = f"on rank{'s' if len(alone) > 1 else ''} {', '.join(map(str, alone))} it is not what the others have"
    else:
        who = "there is no majority to say which rank is wrong"
    return (
        f"replicas differ {when}: {name} is the first of {differing} tensors of {len(columns)} that do; {who}. "
        f"Look for randomness that is not seeded alike, for parameters changed outside the optimizer, or for a rank "
        f"that stepped alone"
    )
