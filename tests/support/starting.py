"""How ranks start, fail and end. Light: ranks import it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils.data

import syncline
from syncline.current import resolve
from syncline.fabric.torch import torch_fabric


def rank_and_process(fabric: syncline.Fabric) -> tuple[int, int, int]:
    return fabric.rank, fabric.world, os.getpid()


def finds_current(fabric: syncline.Fabric) -> bool:
    return syncline.current() is fabric and resolve("auto") is fabric and resolve(fabric) is fabric


def joins_existing_group(fabric: syncline.Fabric, fabric_name: str) -> tuple[str, int, int, list[int]]:
    """`init` in a process that has a process group already."""
    mine = syncline.init(fabric=fabric_name)
    total = mine.all_reduce(torch.tensor([mine.rank + 1]))
    return mine.name, mine.rank, mine.world, total.tolist()


def reduces_in_a_part(fabric: syncline.Fabric, members: list[int]) -> list[int] | None:
    """All-reduce in a process group of some ranks."""
    group = dist.new_group(members)
    if fabric.rank not in members:
        return None
    part = torch_fabric(group)
    return [part.rank, part.world, *part.all_reduce(torch.tensor([fabric.rank]), collective="ring").tolist()]


def not_a_member(fabric: syncline.Fabric) -> str:
    """The message for a rank outside of the group it asks for."""
    group = dist.new_group([0])
    try:
        torch_fabric(group)
    except syncline.SynclineError as error:
        return str(error)
    return ""


def hosts_as_told(fabric: syncline.Fabric, names: list[str]) -> tuple[tuple[int, ...], ...]:
    """The hosts that a fabric finds when ranks pretend to be on some."""
    os.environ["SYNCLINE_HOST"] = names[fabric.rank]
    return torch_fabric().hosts


def number_of_threads(fabric: syncline.Fabric) -> int:
    return torch.get_num_threads()


class CannotTravel(Exception):
    """An exception that cannot be sent to another process."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.callback = lambda: None


def fail_on(fabric: syncline.Fabric, rank: int, error: type[Exception], argument: str, barrier: bool = True) -> int:
    """Rank `rank` fails; the others wait for it or do not."""
    if fabric.rank == rank:
        raise error(argument)
    if barrier:
        fabric.barrier()
    return fabric.rank


def ask_for_a_wrong_name(fabric: syncline.Fabric) -> None:
    fabric.all_reduce(torch.ones(1), collective="rign")


def fail_while_others_sleep(fabric: syncline.Fabric, rank: int, seconds: float) -> None:
    if fabric.rank == rank:
        raise ValueError("one of four")
    time.sleep(seconds)


def end_on(fabric: syncline.Fabric, rank: int, end: Callable[[], None]) -> int:
    """Rank `rank` ends without a word, the others wait for it."""
    if fabric.rank == rank:
        end()
    fabric.barrier()
    return fabric.rank


def returns_what_cannot_travel(fabric: syncline.Fabric) -> object:
    return lambda: fabric.rank


def says_its_process_and_waits(fabric: syncline.Fabric, folder: str, wait: Callable[[syncline.Fabric], None]) -> None:
    """Leave a file named after this process, then wait for what never comes."""
    Path(folder, str(os.getpid())).touch()
    wait(fabric)


def sleep(fabric: syncline.Fabric) -> None:
    time.sleep(60.0)


def wait_for_rank_0(fabric: syncline.Fabric) -> None:
    """All but rank 0 wait inside of the engine."""
    if fabric.rank == 0:
        time.sleep(60.0)
    fabric.barrier()


class Slow(torch.utils.data.Dataset):
    """Numbers, after which a worker leaves a file named after its process; from `stalls` on they take for ever."""

    def __init__(self, folder: str, stalls: int = 1000) -> None:
        self.folder = folder
        self.stalls = stalls

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        Path(self.folder, str(os.getpid())).touch()
        if index >= self.stalls:
            time.sleep(60.0)
        return torch.tensor([float(index)])


def trains_with_a_data_loader(
    fabric: syncline.Fabric, folder: str, start: str, persistent: bool, usual: str
) -> list[float]:
    """Two epochs, of which batches are made by workers; what is left of them is left to the end of the rank."""
    data = Slow(folder)
    assert multiprocessing.get_start_method() == usual
    loader = torch.utils.data.DataLoader(
        data, 4, num_workers=2, multiprocessing_context=start, persistent_workers=persistent
    )
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = syncline.Sync(model, optimizer)
    for _ in range(2):
        for x in loader:
            optimizer.zero_grad()
            (model(x).mean() * (1 + fabric.rank)).backward()
            optimizer.step()
    del sync
    return model.weight.detach().flatten().tolist()


def waits_for_a_data_loader(fabric: syncline.Fabric) -> None:
    """The workers are in the middle of a sample that takes for ever."""
    folder = os.environ["SLOW_FOLDER"]
    if fabric.rank != 1 and os.environ.get("SLOW_FAILS"):
        wait_until(lambda: len(os.listdir(folder)) == 2)
        raise ValueError("this rank fails")
    next(iter(torch.utils.data.DataLoader(Slow(folder, stalls=0), 4, num_workers=2)))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30.0
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
