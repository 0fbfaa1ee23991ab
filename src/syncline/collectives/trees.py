"""Trees as parent tables, and the pipelined waves that run up and down them: for tree, double tree and broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from syncline.collectives.schedule import Round, Transfer

Parents = Sequence[int]  # the parent of each rank; -1 at the root


def heap(world: int, arity: int) -> list[int]:
    """The complete tree in level order: the children of r are k*r + 1 .. k*r + k."""
    return [-1] + [(rank - 1) // arity for rank in range(1, world)]


def depths(parents: Parents) -> list[int]:
    """How far each rank is from the root."""

    def depth(rank: int) -> int:
        return 0 if parents[rank] < 0 else 1 + depth(parents[rank])

    return [depth(rank) for rank in range(len(parents))]


# A wave moves one piece by one level per round; the next piece follows one round behind it. With D levels and
# C pieces a wave takes D + C - 1 rounds, and the wave down starts as soon as the first piece is at the root.


def wave_up(parents: Parents, pieces: Iterable[int]) -> dict[int, list[Transfer]]:
    """Transfers by round that add every piece into the root."""
    depth = depths(parents)
    return collect(
        (max(depth) - depth[rank] + delay, Transfer(rank, parent, piece, piece + 1, "add"))
        for delay, piece in enumerate(pieces)
        for rank, parent in enumerate(parents)
        if parent >= 0
    )


def wave_down(parents: Parents, pieces: Iterable[int], start: int) -> dict[int, list[Transfer]]:
    """Transfers by round that copy every piece from the root, the first of them in round `start`."""
    depth = depths(parents)
    return collect(
        (start + depth[parent] + delay, Transfer(parent, rank, piece, piece + 1, "copy"))
        for delay, piece in enumerate(pieces)
        for rank, parent in enumerate(parents)
        if parent >= 0
    )


def up_and_down(parents: Parents, pieces: Sequence[int]) -> dict[int, list[Transfer]]:
    """Reduce to the root and broadcast from it, both pipelined and overlapping: 2D + C - 1 rounds."""
    return merged([wave_up(parents, pieces), wave_down(parents, pieces, start=max(depths(parents)))])


def collect(placed: Iterable[tuple[int, Transfer]]) -> dict[int, list[Transfer]]:
    """Group transfers by their round."""
    rounds: dict[int, list[Transfer]] = {}
    for number, transfer in placed:
        rounds.setdefault(number, []).append(transfer)
    return rounds


def merged(waves: Iterable[dict[int, list[Transfer]]]) -> dict[int, list[Transfer]]:
    """Several waves in the same rounds."""
    return collect((number, transfer) for wave in waves for number, some in wave.items() for transfer in some)


def as_rounds(wave: dict[int, list[Transfer]]) -> tuple[Round, ...]:
    """In order of rounds."""
    return tuple(tuple(wave[number]) for number in sorted(wave))
