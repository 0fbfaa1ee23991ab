"""When replicas talk."""

from __future__ import annotations

from syncline.modes.asynchronous import AsyncSGD
from syncline.modes.bounded import BoundedStaleness
from syncline.modes.delayed import Delayed
from syncline.modes.diloco import DiLoCo
from syncline.modes.local import LocalSGD
from syncline.modes.mode import Mode
from syncline.modes.slowmo import SlowMo
from syncline.modes.synchronous import Synchronous

__all__ = ["AsyncSGD", "BoundedStaleness", "Delayed", "DiLoCo", "LocalSGD", "Mode", "SlowMo", "Synchronous"]
