"""One rank of an MPI job: `mpirun -n 2 python -m syncline.bench.mpi_rank '[2, [1024], 5]'`. Rank 0 prints JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
from mpi4py import MPI

from syncline.bench.calls import AllReduce, measure


def main(world: int, sizes: list[int], repeats: int) -> None:
    """Time every size; print the slowest rank of each repeat."""
    communicator = MPI.COMM_WORLD
    if communicator.size != world:
        raise SystemExit(f"MPI started {communicator.size} ranks in one world instead of {world}")
    times = {}
    for size in sizes:
        buffer = np.zeros(size // 4, np.float32)

        def call(buffer: np.ndarray = buffer) -> None:
            communicator.Allreduce(MPI.IN_PLACE, buffer)

        contender = AllReduce(buffer, communicator.rank, communicator.size, call, communicator.Barrier)
        by_rank = communicator.gather(measure(contender, repeats))
        if by_rank is not None:
            times[size] = [max(repeat) for repeat in zip(*by_rank, strict=True)]
    if communicator.rank == 0:
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
