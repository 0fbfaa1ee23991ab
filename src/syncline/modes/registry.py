"""Every mode by name: `"local:every=8"` is `LocalSGD(every=8)`."""

from __future__ import annotations

from syncline.modes.asynchronous import AsyncSGD
from syncline.modes.bounded import BoundedStaleness
from syncline.modes.delayed import Delayed
from syncline.modes.diloco import DiLoCo
from syncline.modes.local import LocalSGD
from syncline.modes.mode import Mode
from syncline.modes.slowmo import SlowMo
from syncline.modes.synchronous import Synchronous
from syncline.specs import parse, text_of

MODES: dict[str, type[Mode]] = {
    mode.name: mode for mode in (Synchronous, Delayed, LocalSGD, SlowMo, DiLoCo, AsyncSGD, BoundedStaleness)
}


def mode_of(given: str | Mode) -> Mode:
    """The mode that was given or named."""
    return parse("mode", given, MODES) if isinstance(given, str) else given


def text_of_mode(mode: Mode) -> str:
    """The text that `mode_of` reads back."""
    return text_of(mode.name, mode)
