"""Options that are lists: what they mean, and what they may not be."""

from __future__ import annotations

import re
from collections.abc import Collection

from syncline.errors import ConfigError, UnknownName
from syncline.units import MIB, parse_bytes


def split_list(text: str, option: str, separator: str = ",") -> list[str]:
    """The entries of a list, which has one at least, none of them empty."""
    entries = [entry.strip() for entry in text.split(separator)]
    if not all(entries):
        raise ConfigError(f"{option} {text!r} has an empty entry; separate entries with one {separator!r} each")
    return list(dict.fromkeys(entries))


def known_entries(text: str, option: str, kind: str, known: Collection[str], separator: str = ",") -> list[str]:
    """The entries of a list, each of which must be known."""
    entries = split_list(text, option, separator)
    for entry in entries:
        if entry not in known:
            raise UnknownName(kind, entry, known)
    return entries


def list_rates(text: str) -> list[str]:
    """Rates of links, as tc writes them."""
    rates = split_list(text, "--rates")
    for rate in rates:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?[kmgt]?bit", rate) or float(re.sub("[a-z]", "", rate)) == 0:
            raise ConfigError(f"--rates: {rate!r} is not a rate as tc writes it; try 10gbit, 1gbit or 100mbit")
    return rates


def list_buckets(text: str) -> list[int]:
    """Bucket sizes in bytes; as in DDP's `bucket_cap_mb`, 25mb is 25 * 2**20."""
    sizes = []
    for entry in split_list(text, "--buckets"):
        binary = re.sub(r"(?i)(?<=[0-9])\s*([km])i?b$", r"\1iB", entry)
        size = parse_bytes(binary)
        if size < MIB // 16:
            raise ConfigError(f"--buckets: {entry!r} is less than 64 KiB, which is less than a message costs; try 1mb")
        sizes.append(size)
    return sizes
