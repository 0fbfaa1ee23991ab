"""Training over a slow network: four emulated hosts, a GPT of 5 M parameters, every method in the same run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syncline.bench.hosts import hosts

METHODS: tuple[str, ...] = (
    "ddp",
    "ddp fp16",
    "ddp powersgd",
    "syncline none",
    "syncline fp16",
    "syncline int8",
    "syncline onebit",
    "syncline topk:0.01",
    "syncline powersgd:4",
)
PORT = 29_700
LIMIT_S = 240.0


@dataclass(frozen=True)
class NetworkRow:
    """One method at one rate."""

    rate: str
    method: str
    step_s: float
    exposed_s: float
    said_bytes: int
    loss: float
    times_ddp: float  # the speed-up over DDP without a hook


def compare_methods(
    rates: Sequence[str], methods: Sequence[str], steps: int, count: int, tell: Callable[[str], None]
) -> list[NetworkRow]:
    """All methods at all rates; the first is what the others are compared with."""
    rows: list[NetworkRow] = []
    with hosts(count, rates[0]) as made:
        for number, rate in enumerate(rates):
            made.limit(rate)
            first = 0.0
            for order, method in enumerate(methods):
                tell(f"{rate}: {method}")
                command = [sys.executable, "-m", "syncline.bench.network_rank", method, str(steps)]
                printed = made.run(command, PORT + 100 * number + order, LIMIT_S)
                found = json.loads(printed.strip().splitlines()[-1])
                first = first or found["step_s"]
                rows.append(NetworkRow(rate, method, times_ddp=first / found["step_s"], **found))
    return rows
