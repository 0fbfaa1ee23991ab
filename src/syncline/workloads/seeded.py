"""Weights from a seed, also on ranks that are threads: those share torch's generator, so one draws after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_drawing = Lock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is drawn inside depends on the seed alone; torch's generator is then as it was before."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
