"""Memory that gradients leave behind is there for the next ones."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from syncline.buckets.heap import CHOSEN_BY_USER

# Page faults of ten rounds in which three blocks of 16 MiB are written and freed, after two such rounds.
ROUNDS = """
import resource, sys, torch
from syncline.buckets.heap import keep_freed_memory

def write_and_free():
    blocks = [torch.ones(4 << 20) for _ in range(3)]

keep_freed_memory(int(sys.argv[1]))
for number in range(12):
    if number == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    write_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES_OF_A_ROUND = 3 * (16 << 20) // 4096


def page_faults(largest: int, **environment: str) -> int:
    """In a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name not in CHOSEN_BY_USER}
    command = [sys.executable, "-c", ROUNDS, str(largest)]
    finished = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True)
    return int(finished.stdout)


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")


def test_freed_memory_is_used_again() -> None:
    assert page_faults(16 << 20) < PAGES_OF_A_ROUND


def test_nothing_is_changed_where_gradients_are_small() -> None:
    assert page_faults(1 << 10) > 5 * PAGES_OF_A_ROUND


def test_what_the_user_has_chosen_stays() -> None:
    assert page_faults(16 << 20, MALLOC_TRIM_THRESHOLD_="131072") > 5 * PAGES_OF_A_ROUND
