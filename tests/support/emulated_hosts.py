"""What tests with emulated hosts share: there is one set of them on a machine, whoever tests there."""

from __future__ import annotations

import os

import pytest

from syncline.lab import hosts


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that need the hosts wait until those of another clone are done with them."""
    if request.node.get_closest_marker("needs_net"):
        monkeypatch.setattr(hosts, "PATIENCE_S", 45.0)


def needs_hosts() -> None:
    """Skip where hosts cannot be emulated, unless everything is required."""
    if (reason := hosts.why_not()) and not os.environ.get("SYNCLINE_REQUIRE_ALL"):
        pytest.skip(reason)
