"""Links: how much a device sends, and what its peak is."""

from __future__ import annotations

import pytest

from syncline.errors import SynclineError
from syncline.lab.links import peak_bytes_per_s, sent_by


@pytest.mark.parametrize(("window_s", "expected"), [(0.1, 5000), (0.2, 3000), (1.0, 600)])
def test_the_peak_is_that_of_the_fullest_window(window_s, expected):
    # 500 bytes in the window from 0.5 s to 0.6 s, 100 in the one before, nothing else
    sent = [0, 0, 0, 0, 0, 100, 600, 600, 600, 600, 600]
    samples = [(tenth / 10, count) for tenth, count in enumerate(sent)]
    assert peak_bytes_per_s(samples, window_s - 1e-6) == pytest.approx(expected)


def test_an_idle_link_and_a_short_look_have_no_peak():
    assert peak_bytes_per_s([(0.0, 7), (1.0, 7)], 0.1) == 0
    assert peak_bytes_per_s([(0.0, 0), (0.05, 7)], 0.1) == 0


def test_a_device_that_is_not_there_is_an_error():
    assert sent_by("lo") >= 0
    with pytest.raises(SynclineError, match="no network device 'none0'"):
        sent_by("none0")
