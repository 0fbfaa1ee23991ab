"""Modes over a slow network: samples per second, what is learned from the same samples, and how the link is used.

Emulated hosts train a GPT of 5 M parameters. DDP is measured for a few steps, which take seconds each; what it would
have learned is learned by mode `sync` on fast links, from the same samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from syncline.bench.contenders import Contender
from syncline.bench.metering import Meter, Metered, cleanest
from syncline.bench.timing import most_of_ranks
from syncline.bench.trainer import Trainer
from syncline.bench.workloads import HELD_OUT_BYTES, adamw, gpt_workload, held_out_loss
from syncline.fabric.base import Fabric
from syncline.lab.hosts import OnHosts, hosts
from syncline.lab.links import LinkWatch, peak_bytes_per_s
from syncline.launch.processes import run_processes
from syncline.workloads.gpt import SHAPES

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
BATCH = 1


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
    busy_elsewhere: float = 0.0  # cores that other processes took


def compare_modes_over(
    rate: str, methods: Sequence[str], steps: int, count: int, tell: Callable[[str], None]
) -> Iterator[ModeRow]:
    """All methods at one rate, each when it is done; the first is DDP."""
    with hosts(count, FAST) as made:
        tell(f"sync on links of {FAST}, for its loss")
        reference = train_on_hosts("sync", steps, count)
        made.limit(rate)
        tell(f"ddp at {rate}")
        ddp = cleanest(partial(train_on_hosts, "ddp", min(DDP_STEPS, steps), count), meter := Meter())
        yield row_of("ddp", ddp, ddp.value, reference, reference["loss"])
        for method in methods:
            tell(f"{method} at {rate}")
            found = cleanest(partial(train_on_hosts, method, steps, count), meter)
            yield row_of(method, found, ddp.value, reference, found.value["loss"])


def train_on_hosts(method: str, steps: int, count: int) -> dict[str, float]:
    """What rank 0 says of a training with a rank on every host."""
    return run_processes(partial(train, method=method, steps=steps), count, OnHosts())[0]


def train(fabric: Fabric, method: str, steps: int) -> dict[str, float]:
    """On one rank."""
    workload = gpt_workload("5M", BATCH, partial(adamw, rate=1e-3), HELD_OUT_BYTES)
    mode, _, codec = method.partition(" ")
    contender = Contender("ddp") if mode == "ddp" else Contender(f"syncline {codec or 'none'}", settings={"mode": mode})
    trainer = Trainer(workload, contender, fabric)
    trainer.step()  # is not counted: DDP makes new buckets, and workers take all parameters from their servers
    fabric.barrier()
    watch, started = LinkWatch(), time.perf_counter()
    for _ in range(1, steps):
        trainer.step()
    seconds = time.perf_counter() - started
    samples = watch.stop()
    if trainer.attached.sync is not None and mode.startswith(("async", "bounded")):
        trainer.attached.sync.drain()  # all have what the server has; in other modes a rank is judged by what it has
    peaks = [peak_bytes_per_s(samples, window_s) for window_s in (0.1, 1.0)]
    most = most_of_ranks(fabric, [seconds, *peaks, samples[-1][1] - samples[0][1]])
    loss = fabric.all_reduce(held_out_loss(trainer.model, SHAPES["5M"], 64), op="mean")
    trainer.close()
    fabric.barrier()
    names = ("seconds", "peak_100ms", "peak_1s", "sent_bytes")
    return dict(zip(names, most, strict=True)) | {"loss": float(loss), "steps": steps - 1, "world": fabric.world}


def row_of(
    method: str, found: Metered[dict[str, float]], ddp: dict[str, float], reference: dict[str, float], loss: float
) -> ModeRow:
    """Compared with the others."""
    mine = found.value
    speed, speed_of_ddp = (BATCH * one["world"] * one["steps"] / one["seconds"] for one in (mine, ddp))
    return ModeRow(
        method,
        speed,
        loss,
        mine["sent_bytes"] / mine["steps"],
        mine["peak_100ms"],
        mine["peak_1s"],
        speed / speed_of_ddp,
        loss / reference["loss"] - 1,
        found.busy_elsewhere,
    )
