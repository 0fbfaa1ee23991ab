"""What all tests share: how hypothesis searches, and the law that nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.processes import ranks_left

# Of tests with such a mark, because there is one set of emulated hosts, and one /dev/shm, which MPI uses.
ONE_AT_A_TIME = {"needs_net": "hosts", "needs_mpi": "/dev/shm", "looks_at_shm": "/dev/shm"}

settings.register_profile("syncline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("syncline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is sampled, the cases that are left out are slow ones. Some tests are not run side by side."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.path, item.name.partition("[")[0]].append(item)
    for several in cases.values():
        (wanted,) = several[0].get_closest_marker("sampled").args
        chosen = {number * len(several) // wanted for number in range(wanted)}
        for number, item in enumerate(several):
            if number not in chosen:
                item.add_marker(pytest.mark.slow)
    for item in items:
        for name, group in ONE_AT_A_TIME.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No rank, be it a process or a thread, outlives the test that started it."""
    yield
    until = time.monotonic() + 3.0
    while (left := [*ranks_left(), *threads_left()]) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


def threads_left() -> list[str]:
    """Ranks that are threads of this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]
