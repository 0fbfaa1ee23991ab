"""Parameters that begin to need a gradient do so in the same step on all ranks, or nobody would average it."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.core.ranks import some_ranks
from syncline.errors import Desync
from syncline.fabric.base import Fabric
from syncline.guards.hangs import some
from syncline.replicas import gather_texts


def compare_unfrozen(fabric: Fabric, names: Sequence[str], step: int) -> None:
    """Raise `Desync` on every rank unless all have unfrozen the same parameters."""
    told = [text.splitlines() for text in gather_texts(fabric, "\n".join(names))]
    apart: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for theirs in told for name in theirs):
        ranks = tuple(rank for rank, theirs in enumerate(told) if name in theirs)
        if len(ranks) < fabric.world:
            apart.setdefault(ranks, []).append(name)
    if apart:
        raise Desync(unfrozen_apart(apart, fabric.world, step))


def unfrozen_apart(apart: dict[tuple[int, ...], list[str]], world: int, step: int) -> str:
    """Which parameters, and who has unfrozen them."""
    sides = []
    for ranks, names in apart.items():
        others = [rank for rank in range(world) if rank not in ranks]
        sides.append(f"{some(names)} by {some_ranks([*ranks])} and not by {some_ranks(others)}")
    return (
        f"ranks unfroze different parameters in step {step}: {'; '.join(sides)}. Nobody would average their gradients, "
        f"so this pass was not used, and this Sync makes no other one. Call requires_grad_(True) before the same step "
        f"on all ranks; to go on from here, make what is frozen equal, close() this Sync and make another"
    )
