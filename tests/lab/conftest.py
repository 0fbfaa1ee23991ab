"""Tests here may need emulated hosts."""

from __future__ import annotations

from support.emulated_hosts import patience

__all__ = ["patience"]
