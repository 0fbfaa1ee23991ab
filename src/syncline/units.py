"""Sizes as people write them: `"100MB"` is 100,000,000 bytes, `"25 MiB"` is 26,214,400."""

from __future__ import annotations

import re

from syncline.errors import ConfigError

MIB = 2**20
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_bytes(text: str) -> int:
    """A size in bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise ConfigError(f"{text!r} is not a size; write a number and B, KB, MB, GB, KiB, MiB or GiB, as 100MB")
    return int(float(match[1]) * UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """A size to read."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """A time to read."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
