"""How good what a codec sends is, on every so many steps: how much of it is missing, and whether what is kept grows."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from typing import NamedTuple

log = logging.getLogger(__name__)
EVERY = 50  # steps between samples
GROWN = 10.0  # times the first sample, before it is worth a word
IN_A_ROW = 3  # samples, each larger than the one before


class Quality(NamedTuple):
    """One bucket in one step, on this rank."""

    step: int
    bucket: int
    relative_error: float  # what was not sent, over what was to be sent; without error feedback, the error of the mean
    kept_norm: float  # by error feedback
    cosine: float = 1.0  # between what came out and the mean that it stands for, of some entries
    positions: str = ""  # how those of chosen entries were written, in the fewest bytes: "bitmap", "short" or "rice"


class Watch:
    """Remembers samples, and says once when what a bucket keeps grows without bound."""

    def __init__(self) -> None:
        self.samples: list[Quality] = []
        self.by_bucket: dict[int, list[float]] = defaultdict(list)
        self.warned: set[int] = set()

    def is_due(self, step: int) -> bool:
        """Whether to take a sample in this step."""
        return step % EVERY == 0

    def add(self, sample: Quality) -> None:
        """A bucket of a step whose pass was good."""
        self.samples.append(sample)
        norms = self.by_bucket[sample.bucket]
        norms.append(sample.kept_norm)
        if sample.bucket not in self.warned and grows(norms):
            self.warned.add(sample.bucket)
            log.warning(
                "what bucket %d keeps has grown from %.3g to %.3g by step %d: lower the learning rate, send more, or "
                "begin with a warm-up: warmup:codec=(...), or a longer one of dgc itself",
                sample.bucket,
                norms[0],
                sample.kept_norm,
                sample.step,
            )


def grows(norms: list[float]) -> bool:
    """Far above where it began, and still on its way up."""
    last = norms[-IN_A_ROW - 1 :]
    rising = len(last) > IN_A_ROW and all(before < after for before, after in itertools.pairwise(last))
    return rising and norms[-1] > GROWN * max(norms[0], 1e-30)
