"""Text that every machine with Python has: the source of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

ELSEWHERE = ("site-packages", "dist-packages", "test")  # not of the library, or not there everywhere


def standard_library(most_bytes: int = 8_000_000) -> Tensor:
    """The modules of the standard library one after the other, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for file in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if len(text) < most_bytes and file.parent.name not in ELSEWHERE:
            text += file.read_bytes()
    return torch.frombuffer(text[:most_bytes], dtype=torch.uint8)


class Batches:
    """Pieces of a text. Which ones depends on the seed, the step and the rank, and on nothing else."""

    def __init__(self, text: Tensor, length: int, batch: int, seed: int = 0) -> None:
        self.text = text
        self.length = length
        self.batch = batch
        self.seed = seed

    def of(self, step: int, rank: int) -> Tensor:
        """(batch, length + 1) bytes."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 1_009 + rank)
        starts = torch.randint(len(self.text) - self.length - 1, (self.batch,), generator=generator)
        return torch.stack([self.text[start : start + self.length + 1] for start in starts.tolist()]).long()
