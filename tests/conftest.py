"""What all tests share: where random numbers come from, how hypothesis searches, and that nothing is left behind.

Every test draws from a seed of its own, which depends on its name and `--seed` and is printed when it fails. With the
default of 0 hypothesis tries the same examples in every run; any other number has it look for new ones. Ranks that are
processes begin with torch's own constant seed. Ranks that are threads share one generator, so they give models their
weights with `support.guarded.filled`.
"""

from __future__ import annotations

import importlib
import random
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

from support.patience import within
from support.processes import ranks_left
from syncline.launch import processes

# Of tests with such a mark, because there is one set of emulated hosts, and one /dev/shm, which MPI uses.
ONE_AT_A_TIME = {"needs_net": "hosts", "needs_mpi": "/dev/shm", "looks_at_shm": "/dev/shm"}


class TorchRandom:
    """Torch's generator as hypothesis takes it: the same before every example, and afterwards as it was."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # hypothesis does not keep it alive
register_random(TORCH_RANDOM)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of every random number in tests; 0 tries the same every time")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis searches from the seed, and says how to try what failed again."""
    seed = config.getoption("--seed")
    settings.register_profile(
        "syncline",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=seed == 0,
        print_blob=True,
    )
    settings.load_profile("syncline")
    if seed and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(seed)


def seed_of(item: pytest.Item) -> int:
    """The seed of a test, whoever runs it: xdist adds a group to its id, but not to its name."""
    return zlib.crc32(f"{item.config.getoption('--seed')} {item.path.name}::{item.name}".encode())


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Random numbers that are the same in every run and in every order of tests."""
    seed = seed_of(request.node)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that fails says from which seed it drew."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        seed = item.config.getoption("--seed")
        report.sections.append(("seed", f"{seed_of(item)}, of the name of the test and --seed {seed}"))


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
def no_fabric_of_process() -> Iterator[None]:
    """`init`, and a `Sync` without a fabric, set that of this process; the next test does not find it."""
    of_process = importlib.import_module("syncline.current")._of_process  # the package has a function of that name
    of_process.clear()
    yield
    of_process.clear()


@pytest.fixture(autouse=True)
def others_are_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a rank of `run` has failed, the others have time to say what they know of it, on a busy machine too."""
    monkeypatch.setattr(processes, "GRACE_S", min(within(processes.GRACE_S), 20.0))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No rank, be it a process or a thread, outlives the test that started it."""
    yield
    until = time.monotonic() + within(3.0)
    while (left := [*ranks_left(), *threads_left()]) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


def threads_left() -> list[str]:
    """Ranks that are threads of this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]
