"""Contenders take turns, each in processes of its own and one at a time, at the word of a referee.

In one process they would share what they change in it: how the C library keeps freed memory, for one, decides how many
page faults a step has. A slow moment of the machine hits all alike, and every turn has an order of its own, so that
none always comes after the same other. The last rank is the referee; those who wait, sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from syncline.fabric.base import Fabric

RANKS = 2  # of each contender


def ranks_needed(contenders: int) -> int:
    """For all of them, and the referee."""
    return RANKS * contenders + 1


def ranks_of(contender: int) -> list[int]:
    """The ranks that it consists of."""
    return list(range(RANKS * contender, RANKS * contender + RANKS))


def is_referee(fabric: Fabric) -> bool:
    """Whether this rank gives the word, and does nothing else."""
    return fabric.rank == fabric.world - 1


def give_word(fabric: Fabric, turns: int) -> None:
    """On the referee: every contender has its turn, as often as this."""
    contenders = list(range(fabric.world // RANKS))
    shuffle = Random(0).shuffle
    words = [torch.zeros(1) for _ in range(RANKS)]
    for _ in range(turns):
        shuffle(contenders)
        for contender in contenders:
            addressed = list(zip(words, ranks_of(contender), strict=True))
            fabric.post(addressed, []).wait()
            fabric.post([], addressed).wait()


def turns_of(fabric: Fabric, turns: int) -> Iterator[int]:
    """On a rank of a contender: the number of each turn, when it has come. It lasts until the next one is asked for."""
    word = torch.zeros(1)
    referee = fabric.world - 1
    for number in range(turns):
        fabric.post([], [(word, referee)]).wait()
        yield number
        fabric.post([(word, referee)], []).wait()
