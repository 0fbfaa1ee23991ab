"""Modes over a slow network: samples per second, what is learned from the same samples, and how the link is used.

Emulated hosts train a GPT of 5 M parameters. DDP is measured for a few steps, which take seconds each; what it would
have learned is learned by mode `sync` on fast links, from the same samples.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from syncline.lab.hosts import Hosts, hosts

STREAMING = "diloco:every=32,fragments=8,delay=3,merge=0.5"
METHODS: tuple[str, ...] = (
    "local:every=8",
    "diloco:every=32",
    f"{STREAMING} int8",
    f"{STREAMING} int4",
    "bounded:ahead=4,servers=4 topk:0.01",
    "async:servers=4 topk:0.01",
)
FAST = "10gbit"
DDP_STEPS = 6
PORT = 29_800
LIMIT_S = 400.0


@dataclass(frozen=True)
class ModeRow:
    """One method."""

    method: str
    samples_per_s: float
    loss: float  # on text that nobody trained on, after the same samples
    sent_bytes_per_step: float  # by the rank that sends most
    peak_100ms: float  # bytes per second in the fullest window
    peak_1s: float
    times_ddp: float
    more_loss: float  # than synchronous training, as a fraction of its loss

    def as_data(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def compare_modes_over(
    rate: str, methods: Sequence[str], steps: int, count: int, tell: Callable[[str], None]
) -> Iterator[ModeRow]:
    """All methods at one rate, each when it is done; the first is DDP."""
    with hosts(count, FAST) as made:
        tell(f"sync on links of {FAST}, for its loss")
        reference = train(made, "sync", steps, 0)
        made.limit(rate)
        tell(f"ddp at {rate}")
        ddp = train(made, "ddp", min(DDP_STEPS, steps), 1)
        yield row_of("ddp", ddp | {"loss": reference["loss"]}, ddp, reference, count)
        for number, method in enumerate(methods, start=2):
            tell(f"{method} at {rate}")
            yield row_of(method, train(made, method, steps, number), ddp, reference, count)


def train(made: Hosts, method: str, steps: int, number: int) -> dict[str, float]:
    """What rank 0 printed."""
    command = [sys.executable, "-m", "syncline.bench.modes_rank", method, str(steps)]
    found: dict[str, float] = json.loads(made.run(command, PORT + number, LIMIT_S).strip().splitlines()[-1])
    return found


def row_of(
    method: str, found: dict[str, float], ddp: dict[str, float], reference: dict[str, float], count: int
) -> ModeRow:
    """Compared with the others."""
    speed, speed_of_ddp = (one["samples"] / one["seconds"] for one in (found, ddp))
    return ModeRow(
        method,
        speed,
        found["loss"],
        found["sent_bytes"] * count / found["samples"],
        found["peak_100ms"],
        found["peak_1s"],
        speed / speed_of_ddp,
        found["loss"] / reference["loss"] - 1,
    )
