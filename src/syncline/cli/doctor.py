"""`syncline doctor`: what is here, what was built, and a line of advice for each thing missing."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import syncline
from syncline.units import format_bytes

LEAST_SHM_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    advice: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings for programs.")] = False) -> None:
    """Say what is installed and built, what this machine has, and what to do about what is missing."""
    findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        table.add_row("[yellow]![/]" if finding.advice else "[green]✓[/]", finding.what, finding.found)
    console.print(table)
    for finding in findings:
        if finding.advice:
            console.print(f"[yellow]![/] {escape(finding.what)}: {escape(finding.advice)}")


def examine() -> list[Finding]:
    """Everything that is worth knowing."""
    return [*packages(), native(), *machine(), *engines(), *tools()]


def packages() -> list[Finding]:
    """Versions."""
    here = [Finding("syncline", syncline.__version__), Finding("python", platform.python_version())]
    for name in ("torch", "numpy", "rich", "typer", "plotly"):
        try:
            here.append(Finding(name, version(name)))
        except PackageNotFoundError:
            here.append(Finding(name, "missing", f"pip install {name}"))
    return here


def native() -> Finding:
    """Whether the native module was built, and how."""
    if importlib.util.find_spec("syncline._native") is None:
        return Finding(
            "native module",
            "not built: the slower pure Python paths are used",
            "install a C++20 compiler (Debian: apt-get install g++) and reinstall syncline",
        )
    from syncline._native import build_info

    return Finding("native module", ", ".join(f"{key} {value}" for key, value in build_info().items()))


def machine() -> list[Finding]:
    """Cores and memory."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [
        Finding("cores", str(cores), "" if cores > 1 else "ranks will take turns on one core; timings mean little"),
        Finding("memory", format_bytes(memory)),
        shared_memory(),
    ]


def shared_memory() -> Finding:
    """How much there is in /dev/shm."""
    if not os.path.isdir("/dev/shm"):
        return Finding("/dev/shm", "missing", "mount a tmpfs there, or use the torch fabric")
    total, _, free = shutil.disk_usage("/dev/shm")
    small = free < LEAST_SHM_BYTES
    advice = "data loaders and MPI need it; in Docker give --shm-size=2g or --ipc=host" if small else ""
    return Finding("/dev/shm", f"{format_bytes(total)}, {format_bytes(free)} free", advice)


def engines() -> list[Finding]:
    """What torch.distributed can use here."""
    if not dist.is_available():
        return [
            Finding("torch.distributed", "not in this torch", "install a torch build that has it; threads still work")
        ]
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    missing = {
        "gloo": "this torch was built without it; the usual builds have it",
        "nccl": "only needed for NVIDIA GPUs; install a CUDA build of torch there",
        "mpi": "only in builds of torch from source with an MPI; Gloo does the same job",
    }
    found = [
        Finding(f"torch {name}", "available" if there else "not available", "" if there else missing[name])
        for name, there in available.items()
    ]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    advice = "" if gpus == 0 or available["nccl"] else missing["nccl"]
    return [*found, Finding("GPUs", str(gpus) if gpus else "none (NCCL paths are untested without)", advice)]


def tools() -> list[Finding]:
    """What benchmarks and network tests use if it is there."""
    advice = {
        "ip": "several hosts on one machine need it: apt-get install iproute2",
        "mpirun.openmpi": "the benchmark compares with it: apt-get install openmpi-bin",
        "mpirun.mpich": "the benchmark compares with it: apt-get install mpich",
    }
    return [
        Finding(name, shutil.which(name) or "missing", "" if shutil.which(name) else advice[name]) for name in advice
    ]
