"""Memory that gradients leave behind is there for the next ones."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from syncline.reducer.heap import CHOSEN_BY_USER

# Prints how many pages stay when a first block of 16 MiB is freed, and the page faults of ten rounds of three of them.
ROUNDS = """
import resource, sys, torch
from syncline.reducer.heap import keep_freed_memory

def write_and_free(count):
    blocks = [torch.ones(4 << 20) for _ in range(count)]

def resident():
    return int(open("/proc/self/statm").read().split()[1])

keep_freed_memory(int(sys.argv[1]))
before = resident()
write_and_free(1)
print(resident() - before)

for number in range(12):
    if number == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    write_and_free(3)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES_OF_A_BLOCK = (16 << 20) // 4096


def kept_and_faults(largest: int, **environment: str) -> tuple[int, int]:
    """In a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name not in CHOSEN_BY_USER}
    command = [sys.executable, "-c", ROUNDS, str(largest)]
    finished = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True)
    kept, faults = map(int, finished.stdout.split())
    return kept, faults


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")


def test_freed_memory_is_used_again() -> None:
    kept, faults = kept_and_faults(16 << 20)
    assert kept > PAGES_OF_A_BLOCK // 2
    assert faults < PAGES_OF_A_BLOCK


def test_nothing_is_changed_where_gradients_are_small() -> None:
    kept, _ = kept_and_faults(1 << 10)  # faults depend on what glibc has learned
    assert kept < PAGES_OF_A_BLOCK // 2


def test_what_the_user_has_chosen_stays() -> None:
    kept, faults = kept_and_faults(16 << 20, MALLOC_TRIM_THRESHOLD_="131072")
    assert kept < PAGES_OF_A_BLOCK // 2
    assert faults > 15 * PAGES_OF_A_BLOCK
