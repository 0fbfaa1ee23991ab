"""Who takes part: our shared-memory fabric, Gloo, two MPIs, and the machine itself.

Each contender is run on its own, in as many processes as there are ranks, and returns for every size the seconds per
call: one figure for each repeat, that of the slowest rank.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from syncline.bench.calls import AllReduce, measure
from syncline.errors import SynclineError
from syncline.fabric.base import Fabric
from syncline.fabric.shm import DTYPE_CODES, OP_CODES, ShmTransport
from syncline.launch import run

Times = dict[int, list[float]]  # bytes -> seconds per call, one for each repeat
MPI_LIMIT_S = 600.0


def on_ranks(
    ranks: int,
    sizes: Sequence[int],
    repeats: int,
    time_sizes: Callable[..., Times],
    fabric: str,
) -> Times:
    """Time all sizes on local ranks; of each repeat the slowest rank counts."""
    by_rank = run(partial(time_sizes, sizes=sizes, repeats=repeats), ranks, fabric)
    return {
        size: [max(times) for times in zip(*(of_rank[size] for of_rank in by_rank), strict=True)] for size in by_rank[0]
    }


def time_shared(fabric: Fabric, sizes: Sequence[int], repeats: int) -> Times:
    """On one rank: ours, with buffers that peers reach in place."""
    return {size: time_tensor(fabric, fabric.buffer(size // 4), fabric.all_reduce, repeats) for size in sizes}


def time_private(fabric: Fabric, sizes: Sequence[int], repeats: int) -> Times:
    """On one rank: ours, with tensors that must be staged."""
    return {size: time_tensor(fabric, torch.zeros(size // 4), fabric.all_reduce, repeats) for size in sizes}


def time_gloo(fabric: Fabric, sizes: Sequence[int], repeats: int) -> Times:
    """On one rank: torch.distributed with Gloo, with nothing of ours around the call."""
    return {size: time_tensor(fabric, torch.zeros(size // 4), dist.all_reduce, repeats) for size in sizes}


def time_limit(fabric: Fabric, sizes: Sequence[int], repeats: int) -> Times:
    """On one rank: the same reads and writes by the same number of processes, without any synchronization."""
    assert isinstance(fabric.transport, ShmTransport)
    group = fabric.transport.native

    def unsynchronized(tensor: torch.Tensor) -> None:
        group.unsynchronized_all_reduce(tensor.data_ptr(), tensor.numel(), DTYPE_CODES[tensor.dtype], OP_CODES["sum"])

    return {size: time_tensor(fabric, fabric.buffer(size // 4), unsynchronized, repeats, False) for size in sizes}


def time_tensor(
    fabric: Fabric, tensor: torch.Tensor, call: Callable[[torch.Tensor], object], repeats: int, exact: bool = True
) -> list[float]:
    """One size of one contender on one rank."""
    work = AllReduce(tensor.numpy(), fabric.rank, fabric.world, partial(call, tensor), fabric.barrier, exact=exact)
    return measure(work, repeats)


def open_mpi(ranks: int, sizes: Sequence[int], repeats: int) -> Times:
    """Open MPI through mpi4py."""
    command = ["mpirun.openmpi", "--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
    return time_mpi(command, {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "libmpi.so.40"}, ranks, sizes, repeats)


def mpich(ranks: int, sizes: Sequence[int], repeats: int) -> Times:
    """MPICH through mpi4py."""
    with mpich_library() as folder:
        environment = {"LD_LIBRARY_PATH": folder, "MPI4PY_MPIABI": "mpich"}
        return time_mpi(["mpiexec.mpich", "-n", str(ranks)], environment, ranks, sizes, repeats)


@contextmanager
def mpich_library() -> Iterator[str]:
    """A folder with MPICH's library under the name by which mpi4py looks for it; Debian gives it another."""
    listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"libmpich\.so\.12 .*=> (\S+)", listing)
    if found is None:
        raise SynclineError("libmpich.so.12 is not installed; on Debian: apt-get install mpich libmpich-dev")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "libmpi.so.12").symlink_to(found[1])
        yield folder


def time_mpi(command: list[str], environment: dict[str, str], ranks: int, sizes: Sequence[int], repeats: int) -> Times:
    """Start ranks with an MPI's own launcher and read what rank 0 prints last."""
    arguments = [sys.executable, "-m", "syncline.bench.mpi_rank", json.dumps([ranks, list(sizes), repeats])]
    finished = subprocess.run(
        command + arguments,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=MPI_LIMIT_S,
        check=False,
    )
    if finished.returncode:
        raise SynclineError(f"{command[0]} failed: {finished.stderr.strip()[-500:]}")
    return {int(size): times for size, times in json.loads(finished.stdout.strip().splitlines()[-1]).items()}


CONTENDERS: dict[str, Callable[[int, Sequence[int], int], Times]] = {
    "syncline": partial(on_ranks, time_sizes=time_shared, fabric="shm"),
    "syncline private": partial(on_ranks, time_sizes=time_private, fabric="shm"),
    "gloo": partial(on_ranks, time_sizes=time_gloo, fabric="torch"),
    "open mpi": open_mpi,
    "mpich": mpich,
    "limit": partial(on_ranks, time_sizes=time_limit, fabric="shm"),
}
NEEDS = {"open mpi": "mpirun.openmpi", "mpich": "mpiexec.mpich"}


def present() -> list[str]:
    """Those that can run here."""
    return [name for name in CONTENDERS if name not in NEEDS or shutil.which(NEEDS[name])]
