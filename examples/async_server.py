"""A parameter server and workers of uneven speed: nobody waits for the slow one.

    torchrun --nproc-per-node 4 examples/async_server.py               the last process serves, three train
    torchrun --nproc-per-node 4 examples/async_server.py --ahead 4     none is more than 4 steps ahead of the slowest

On several hosts, the same line on each of them:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-endpoint HOST:29400 --rdzv-backend c10d examples/async_server.py
"""

import argparse
import time

import torch

import syncline
from syncline.workloads.gpt import Shape, make_gpt
from syncline.workloads.text import Batches, standard_library


def main() -> None:
    options = read_options()
    fabric = syncline.init()
    torch.set_num_threads(1)
    shape = Shape(width=64, layers=2, heads=2, context=32)
    model = make_gpt(shape)
    batches = Batches(standard_library(), shape.context, batch=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)  # it runs at the server, with these settings
    mode = "async:apart=true" if options.ahead is None else f"bounded:apart=true,ahead={options.ahead}"
    sync = syncline.Sync(model, optimizer, mode=mode)
    until = fabric.broadcast(torch.tensor([time.time() + options.seconds], dtype=torch.float64)).item()
    if sync.serve():  # on the server this lasts until the workers have left
        return

    slow = fabric.rank == 0  # this worker computes three times as long as the others
    steps = 0
    while time.time() < until:  # at the same time everywhere, whoever began late
        loss = model.loss(batches.of(steps, fabric.rank))
        time.sleep(0.06 if slow else 0.02)  # stands for the computation of a larger model
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # gradients go to the server, and its parameters come back
        steps += 1
    print(f"worker {fabric.rank}: {steps} steps, loss {loss.item():.3f}, staleness {sync.staleness()}", flush=True)

    sync.drain()  # workers meet, and all have what the server has
    if fabric.rank == 0:
        torch.save(model.state_dict(), options.save)
    sync.close()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--ahead", type=int, default=None, help="steps; without it, without a bound")
    parser.add_argument("--save", default="async-server.pt", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
