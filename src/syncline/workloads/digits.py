"""Handwritten digits that come with scikit-learn: 1797 images of 8 by 8, of which every fifth is kept for judging."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from syncline.errors import ConfigError
from syncline.workloads.seeded import seeded

PIXELS, CLASSES = 64, 10


class Digits(NamedTuple):
    """Images, flat and from 0 to 1, and what they show."""

    images: Tensor
    labels: Tensor


def load_digits() -> tuple[Digits, Digits]:
    """Those to learn from, and those to judge by."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ConfigError(
            "the digits come with scikit-learn, which is not here; try: pip install syncline[digits]"
        ) from error
    images, labels = load(return_X_y=True)
    digits = Digits(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    kept = torch.arange(len(digits.labels)) % 5 == 0
    return Digits(digits.images[~kept], digits.labels[~kept]), Digits(digits.images[kept], digits.labels[kept])


class DigitBatches:
    """Images at random. Which ones depends on the seed, the step and the rank, and on nothing else."""

    def __init__(self, digits: Digits, batch: int, seed: int = 0) -> None:
        self.digits = digits
        self.batch = batch
        self.seed = seed

    def of(self, step: int, rank: int) -> Digits:
        """A batch of them."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 1_009 + rank)
        chosen = torch.randint(len(self.digits.labels), (self.batch,), generator=generator)
        return Digits(self.digits.images[chosen], self.digits.labels[chosen])


def make_classifier(width: int = 128, seed: int = 0) -> nn.Sequential:
    """Two hidden layers, with the same weights for the same seed."""
    with seeded(seed):
        return nn.Sequential(
            nn.Linear(PIXELS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )
