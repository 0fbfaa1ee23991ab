"""Ranks as threads of this process."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from syncline.current import using
from syncline.launch.failures import Failure, rank_failed

if TYPE_CHECKING:
    from syncline.fabric.base import Fabric
    from syncline.fabric.threads import ThreadGroup

T = TypeVar("T")


def run_threads(fn: Callable[[Fabric], T], group: ThreadGroup) -> list[T]:
    """Call `fn` in one thread per rank. A rank that fails leaves the group, which ends the waits of the others."""
    results: dict[int, T] = {}
    failures: list[Failure] = []

    def work(rank: int) -> None:
        with group.fabric(rank) as fabric, using(fabric):
            try:
                results[rank] = fn(fabric)
            except BaseException as error:
                failures.append(Failure(rank, error, traceback.format_exc(), len(failures)))
                fabric.close(drain=False)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(group.world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise rank_failed(failures, results)
    return [results[rank] for rank in range(group.world)]
