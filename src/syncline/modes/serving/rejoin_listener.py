"""The thread at a server that lets replacement workers rejoin, each in the place of one that died."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from syncline.errors import FabricError
from syncline.fabric.membership import RejoinEndpoint, RejoinRequest

log = logging.getLogger(__name__)
POLL_S = 0.2  # between looks for requests


class RejoinListener:
    """Waits for requests at one server's endpoint."""

    def __init__(
        self, rank: int, endpoint: RejoinEndpoint, rejoined: Callable[[RejoinEndpoint, RejoinRequest], None]
    ) -> None:
        self.rank = rank
        self.endpoint = endpoint
        self.rejoined = rejoined
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.listen, name=f"rank {rank} lets workers rejoin", daemon=True)
        self.thread.start()

    def listen(self) -> None:
        """Answer requests until the server ends, or nobody can come."""
        try:
            while not self.closing.wait(POLL_S):
                if request := self.endpoint.poll():
                    self.answer(request)
        except FabricError as error:
            log.info("rank %d lets nobody rejoin any more: %s", self.rank, error)

    def answer(self, request: RejoinRequest) -> None:
        """Let one rejoin; if it dies meanwhile, there may be another."""
        try:
            self.rejoined(self.endpoint, request)
        except FabricError as error:
            log.info("rank %d did not let %s rejoin: %s", self.rank, request, error)
        except Exception:
            log.exception("rank %d cannot let %s rejoin", self.rank, request)

    def close(self) -> None:
        """Let nobody rejoin any more."""
        self.closing.set()
        self.thread.join()
        self.endpoint.close()
