"""Train a byte-level GPT on the text of Python's own standard library.

    python examples/train_gpt.py                                     one process
    torchrun --nproc-per-node 2 examples/train_gpt.py                two processes of this machine

On several hosts, the same line on each of them:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-endpoint HOST:29400 --rdzv-backend c10d examples/train_gpt.py
"""

import argparse
import time

import torch

import syncline
from syncline.workloads.gpt import SHAPES, make_gpt
from syncline.workloads.text import Batches, standard_library


def main() -> None:
    options = read_options()
    fabric = syncline.init(fabric=options.fabric)
    torch.set_num_threads(max(1, torch.get_num_threads() // len(fabric.hosts[0])))
    shape = SHAPES[options.size]
    batches = Batches(standard_library(), shape.context, options.batch)
    model = make_gpt(shape, seed=fabric.rank)  # whatever the others start with, they get the weights of rank 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    sync = syncline.Sync(
        model, optimizer, codec=options.codec, collective=options.collective, accumulate=options.accumulate
    )

    started = time.perf_counter()
    for step in range(options.steps):
        optimizer.zero_grad()
        for part in range(options.accumulate):
            text = batches.of(step * options.accumulate + part, fabric.rank)
            loss = model.loss(text) / options.accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the mean over ranks
        optimizer.step()
        schedule.step()
        if step % 10 == 9 and fabric.rank == 0:
            speed = (step + 1) / (time.perf_counter() - started)
            print(f"step {step + 1}: loss {loss.item() * options.accumulate:.3f}, {speed:.2f} steps/s", flush=True)
    if fabric.rank == 0:
        print(sync.report())


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", choices=SHAPES, default="10M")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and backward pass")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes per optimizer step")
    parser.add_argument("--codec", default="none", help="none, fp16, int8, topk:0.01, powersgd:4, ...")
    parser.add_argument("--collective", default="auto", help="auto, ring, tree, engine, ...")
    parser.add_argument("--fabric", default="auto", help="auto, shm, torch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
