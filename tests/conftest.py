"""What all tests share: how hypothesis searches, and the law that nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from processes import ranks_left

settings.register_profile("syncline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("syncline")


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
