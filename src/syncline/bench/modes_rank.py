"""One rank of the benchmark of modes, on a host of its own: python -m syncline.bench.modes_rank METHOD STEPS"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.lab.links import LinkWatch, peak_bytes_per_s
from syncline.workloads.gpt import SHAPES, make_gpt, next_byte_loss
from syncline.workloads.text import Batches, standard_library

SHAPE = SHAPES["5M"]
BATCH = 1
HELD_OUT_BYTES = 200_000  # at the end of the text


def main(method: str, steps: int) -> None:
    """Train, and let rank 0 print what was seen."""
    torch.set_num_threads(1)
    fabric = syncline.init(fabric="torch")
    text = standard_library()
    batches = Batches(text[:-HELD_OUT_BYTES], SHAPE.context, BATCH)
    model = make_gpt(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained, sync = with_method(model, optimizer, method)

    def step(number: int) -> None:
        optimizer.zero_grad()
        next_byte_loss(trained, batches.of(number, fabric.rank)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step(0)  # is not counted: DDP makes new buckets, and workers take all parameters from their servers
    fabric.barrier()
    watch, started = LinkWatch(), time.perf_counter()
    for number in range(1, steps):
        step(number)
    seconds = time.perf_counter() - started
    samples = watch.stop()
    if sync is not None and method.startswith(("async", "bounded")):
        sync.drain()  # all have what the server has; in the other modes a rank is judged by what it has
    mine = [
        seconds,
        peak_bytes_per_s(samples, 0.1),
        peak_bytes_per_s(samples, 1.0),
        float(samples[-1][1] - samples[0][1]),
    ]
    most = fabric.all_reduce(torch.tensor(mine), op="max").tolist()
    loss = fabric.all_reduce(held_out_loss(model, text[-HELD_OUT_BYTES:]), op="mean")
    if fabric.rank == 0:
        names = ("seconds", "peak_100ms", "peak_1s", "sent_bytes")
        figures = dict(zip(names, most, strict=True)) | {
            "loss": float(loss),
            "samples": (steps - 1) * BATCH * fabric.world,
        }
        print(json.dumps(figures))
    if sync is not None:
        sync.close()
    fabric.barrier()


def with_method(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: str
) -> tuple[nn.Module, syncline.Sync | None]:
    """DDP, or a mode and perhaps a codec: `diloco:every=32 int8`."""
    if method == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True), None
    mode, _, codec = method.partition(" ")
    return model, syncline.Sync(model, optimizer, mode=mode, codec=codec or "none")


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Of this rank's replica, on text that nobody trained on."""
    return next_byte_loss(model, Batches(text, SHAPE.context, 64).of(0, 0))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
