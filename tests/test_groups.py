"""Tests that must not run side by side."""

from __future__ import annotations

import os

import pytest


@pytest.mark.looks_at_shm
def test_tests_of_a_group_are_known_to_belong_to_it(request: pytest.FixtureRequest) -> None:
    """Some versions of pytest and pytest-xdist do not understand each other, and say nothing."""
    is_side_by_side = "PYTEST_XDIST_WORKER" in os.environ
    assert request.node.nodeid.endswith("@/dev/shm") == is_side_by_side
