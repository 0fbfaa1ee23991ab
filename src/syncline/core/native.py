"""The native module, or None where it was not built: then everything that has a reference kernel in torch uses that."""

from __future__ import annotations

from types import ModuleType

try:
    from syncline import _native as found
except ImportError:
    native: ModuleType | None = None
else:
    native = found

__all__ = ["native"]
