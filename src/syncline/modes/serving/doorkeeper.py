"""The thread at a server that lets in workers that come later, each in the place of one that died."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from syncline.errors import FabricError
from syncline.fabric.newcomers import Door, Knock

log = logging.getLogger(__name__)
LOOK_S = 0.2  # between looks at the door


class Doorkeeper:
    """Looks after one server's door."""

    def __init__(self, rank: int, door: Door, let_in: Callable[[Door, Knock], None]) -> None:
        self.rank = rank
        self.door = door
        self.let_in = let_in
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.keep, name=f"rank {rank} keeps its door", daemon=True)
        self.thread.start()

    def keep(self) -> None:
        """Until the server ends, or nobody can come."""
        try:
            while not self.closing.wait(LOOK_S):
                if knock := self.door.look():
                    self.meet(knock)
        except FabricError as error:
            log.info("rank %d lets in nobody any more: %s", self.rank, error)

    def meet(self, knock: Knock) -> None:
        """Let one in; if it dies meanwhile, there may be another."""
        try:
            self.let_in(self.door, knock)
        except FabricError as error:
            log.info("rank %d did not let in %s: %s", self.rank, knock, error)
        except Exception:
            log.exception("rank %d cannot let in %s", self.rank, knock)

    def close(self) -> None:
        """Let in nobody any more."""
        self.closing.set()
        self.thread.join()
        self.door.close()
