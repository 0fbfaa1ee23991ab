"""What tests of benchmarks share: there is one set of emulated hosts on a machine, whoever tests there."""

from __future__ import annotations

import pytest

from syncline.lab import hosts


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that need the hosts wait until those of another clone are done with them."""
    if request.node.get_closest_marker("needs_net"):
        monkeypatch.setattr(hosts, "PATIENCE_S", 45.0)
