"""Two sites with a slow link between them: each trains alone for 50 steps, then they exchange how far they have come.

On each site, with the address of the first for HOST:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29400 --rdzv-backend c10d examples/two_sites_diloco.py

To try it on one machine, with two processes for the sites:

    torchrun --nproc-per-node 2 examples/two_sites_diloco.py --every 10 --steps 40

Or, as root, on two hosts that are emulated with a link of 100 Mbit/s:

    python -c "from syncline.lab.hosts import hosts
    with hosts(2, '100mbit') as made:
        print(made.run(['python', 'examples/two_sites_diloco.py'], port=29400, limit_s=600))"

`--streaming` sends the model in four parts while training goes on, so that nobody waits, and in 4 bits a value.
"""

import argparse
import time

import torch

import syncline
from syncline.workloads.gpt import SHAPES, make_gpt
from syncline.workloads.text import Batches, standard_library


def main() -> None:
    options = read_options()
    fabric = syncline.init()
    shape = SHAPES[options.size]
    batches = Batches(standard_library(), shape.context, batch=4)
    model = make_gpt(shape, seed=fabric.rank)  # whatever the others start with, they get the weights of rank 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.streaming:
        # A quarter of the model leaves every `every` / 4 steps and may travel for all of them but one.
        turn = options.every // 4
        mode = f"diloco:every={4 * turn},fragments=4,delay={turn - 1},merge=0.5"
        sync = syncline.Sync(model, optimizer, mode=mode, codec="int4")
    else:
        sync = syncline.Sync(model, optimizer, mode=f"diloco:every={options.every}")

    started = time.perf_counter()
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        loss = model.loss(batches.of(step, fabric.rank))
        loss.backward()
        optimizer.step()  # this is also where sites meet, when it is time
        if step % options.every == 0 and fabric.rank == 0:
            speed = step / (time.perf_counter() - started)
            print(f"step {step}: loss {loss.item():.3f} at site 0, {speed:.2f} steps/s", flush=True)

    sync.drain()  # the sites meet a last time: from here on they have the same model
    if fabric.rank == 0:
        torch.save(model.state_dict(), options.save)
        print(f"the model of all sites: {options.save}")
        print(sync.report())
    sync.close()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps alone; more communicates less, 8 or more")
    parser.add_argument("--streaming", action="store_true")
    parser.add_argument("--size", choices=SHAPES, default="5M")
    parser.add_argument("--save", default="two-sites.pt", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
