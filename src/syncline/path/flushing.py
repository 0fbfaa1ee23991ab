"""Residuals that the codec has no place for are sent densely with the next gradients, and then its own path is taken.

A run gets there when it goes on with a codec without error feedback: by `Sync.reconfigure`, or from a checkpoint. All
that the codec before it had left out is in the first good pass; until then, and in a checkpoint, it is kept as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakSet

import torch

from syncline.codecs.none import NoCodec
from syncline.core.status import OwnStatus, PassStatus
from syncline.path.codec_state import Saved
from syncline.path.coded import CodedPath
from syncline.path.path import Path
from syncline.path.work import GradientBucket, PassWork


@dataclass(frozen=True, kw_only=True)
class Dense(NoCodec):
    """Sends gradient and residual in float32, so that no residual is left."""

    feedback: ClassVar[bool] = True  # type: ignore[misc]


class FlushingPath(Path):
    """Takes one path until its residuals are sent, and another one from then on, at the same pass on all ranks."""

    def __init__(self, flush: CodedPath, then: Path) -> None:
        super().__init__(then.fabric, then.collective, then.recorder)
        self.flush = flush
        self.then = then
        self.now: Path = flush  # that the next pass takes, if residuals are not sent by then
        self.passes: WeakSet[PassWork] = WeakSet()  # that carry residuals
        self.is_flushed = False
        flush.good_passes = then.good_passes

    @property
    def good_passes(self) -> int:
        """Those of both paths: the one that passes take counts on, in the thread of its codec."""
        return self.now.good_passes

    @good_passes.setter
    def good_passes(self, count: int) -> None:
        self.now.good_passes = count

    @property
    def has_residuals(self) -> bool:  # type: ignore[override]
        return self.now.has_residuals

    def divisor_of(self, dtype: torch.dtype) -> int:
        return self.now.divisor_of(dtype)

    def begin(self, number: int, has_data: bool = True) -> PassWork:
        if self.is_flushed and self.now is self.flush:
            self._change_over()
        self.now.joined = self.joined
        current = self.now.begin(number, has_data)
        if self.now is self.flush:
            self.passes.add(current)
        return current

    def _change_over(self) -> None:
        """Wait for later passes that left before it was known that residuals were sent: the paths share a channel.

        They may be good too, so that the other path counts on from here and not from when residuals were sent.
        """
        for current in sorted(self.passes, key=lambda one: one.number):
            self.flush.wait(current)
        self.flush.close()
        self.then.good_passes = self.flush.good_passes
        self.now = self.then

    def _of(self, current: PassWork) -> Path:
        """The path that a pass takes."""
        return self.flush if current in self.passes else self.then

    def start(self, current: PassWork, bucket: GradientBucket) -> None:
        self._of(current).start(current, bucket)

    def end(self, current: PassWork, own: OwnStatus) -> None:
        self._of(current).end(current, own)

    def wait_for_status(self, current: PassWork) -> PassStatus:
        return self._of(current).wait_for_status(current)

    def wait(self, current: PassWork) -> PassStatus:
        path = self._of(current)
        status = path.wait(current)
        if path is self.flush:
            self.is_flushed = self.is_flushed or status.is_good
        return status

    def count_good(self, current: PassWork) -> None:
        self._of(current).count_good(current)

    def state_dict(self) -> Saved:
        then = self.then.state_dict()
        return then if self.is_flushed else self.flush.state_dict() | {"state": then.get("state", {})}

    def load_state_dict(self, saved: Saved) -> None:
        self.flush.load_state_dict(saved | {"state": {}})
        self.then.load_state_dict(saved | {"residual": {}, "step_scale": {}})
        self.is_flushed = not saved.get("residual")

    def close(self) -> None:
        self.flush.close()
        self.then.close()
