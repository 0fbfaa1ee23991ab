"""Training over a slow network: emulated hosts, a GPT, every method in the same run.

A method pays where its steps are faster than those of the same trainer without compression, by more than noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from syncline.lab.hosts import OnHosts, hosts
from syncline.bench.network_rank import HOOKS, Figures, train
from syncline.codecs.registry import codec_of
from syncline.errors import UnknownName
from syncline.launch.processes import run_processes

RATES = ("10gbit", "1gbit", "100mbit")
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
LEAST_GAIN = 1.05  # of steps per second, for a method to pay; less is noise


@dataclass(frozen=True)
class NetworkRow:
    """One method at one rate."""

    rate: str
    method: str
    figures: Figures
    times_ddp: float | None  # the speed-up over DDP without a hook, if that was measured
    times_dense: float | None  # over the same trainer without compression; None if this is that, or it was not measured

    @property
    def pays(self) -> bool | None:
        """Whether compression makes steps faster here; None if there is none, or nothing to compare with."""
        return None if self.times_dense is None else self.times_dense >= LEAST_GAIN

    def as_data(self) -> dict[str, Any]:
        """For programs."""
        return {
            "rate": self.rate,
            "method": self.method,
            "steps_per_s": self.figures.steps_per_s,
            **asdict(self.figures),
            "times_ddp": self.times_ddp,
            "times_dense": self.times_dense,
            "pays": self.pays,
        }


def check_method(method: str) -> None:
    """One of DDP's hooks, or a codec of ours."""
    trainer, _, codec = method.partition(" ")
    if trainer == "syncline" and codec:
        codec_of(codec)
    elif method not in HOOKS:
        raise UnknownName("method", method, METHODS)


def compare_methods(
    rates: Sequence[str], methods: Sequence[str], steps: int, count: int, size: str, tell: Callable[[str], None]
) -> Iterator[list[NetworkRow]]:
    """All methods at one rate, then at the next."""
    with hosts(count, rates[0]) as made:
        for rate in rates:
            made.limit(rate)
            seen = {}
            for method in methods:
                tell(f"{rate}: {method}")
                work = partial(train, method=method, steps=steps, size=size)
                seen[method] = run_processes(work, count, OnHosts())[0]
            yield rows_of(rate, seen)


def rows_of(rate: str, seen: Mapping[str, Figures]) -> list[NetworkRow]:
    """Compared with each other."""

    def faster(method: str, than: str) -> float | None:
        return seen[method].steps_per_s / seen[than].steps_per_s if than in seen else None

    return [
        NetworkRow(
            rate,
            method,
            figures,
            faster(method, "ddp"),
            None if method == dense_of(method) else faster(method, dense_of(method)),
        )
        for method, figures in seen.items()
    ]


def dense_of(method: str) -> str:
    """The same trainer without compression."""
    return "ddp" if method in HOOKS else "syncline none"


def verdict(rows: Sequence[NetworkRow]) -> str:
    """In words: which methods do not pay at the rate of these rows."""
    judged = [row for row in rows if row.pays is not None]
    if not judged:
        return f"{rows[0].rate}: there is no compression to judge, or nothing to compare it with"
    losing = [row.method for row in judged if not row.pays]
    if not losing:
        return f"{rows[0].rate}: all compression pays"
    if len(losing) == len(judged):
        return f"{rows[0].rate}: no compression pays"
    return f"{rows[0].rate}: compression does not pay with {', '.join(losing)}"
