"""The serving side of a rank: its server, a thread for each worker, and one that lets replacement workers rejoin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from syncline.codecs.codec import Codec
from syncline.fabric.membership import RejoinEndpoint, RejoinRequest
from syncline.modes.replica import Replica
from syncline.modes.serving.attendant import Attendant
from syncline.modes.serving.link import FabricLink, Link
from syncline.modes.serving.rejoin_listener import RejoinListener
from syncline.modes.serving.server import Rules, Server
from syncline.path.bucket import Slot

LOOK_S = 0.5  # a server that has nothing else to do looks for Ctrl-C so often


class Service:
    """Of the parameters of some buckets."""

    def __init__(
        self,
        replica: Replica,
        buckets: Mapping[int, Sequence[Slot]],
        workers: Sequence[int],
        rules: Rules,
        pull: Codec,
        shared: bool,
    ) -> None:
        fabric = replica.fabric
        self.replica = replica
        self.buckets = buckets
        self.pull = pull
        self.server = Server(
            fabric.rank, buckets, replica.optimizers, workers, rules, shared, fabric.deadlines.operation
        )
        self.attendants: dict[int, Attendant] = {}  # by worker
        self.listener: RejoinListener | None = None
        if fabric.membership is not None:
            self.listener = RejoinListener(fabric.rank, fabric.membership.listen(fabric), self.rejoined)

    def attend(self, worker: int, link: Link) -> None:
        """A thread for one worker."""
        settings = self.replica.settings
        self.attendants[worker] = Attendant(
            self.server, self.buckets, worker, link, settings.codec, self.pull, settings.seed, self.replica
        )

    def rejoined(self, endpoint: RejoinEndpoint, request: RejoinRequest) -> None:
        """A new process has come for a worker, so the last one is gone, whoever has noticed."""
        if attendant := self.attendants.pop(request.rank, None):
            attendant.close()
        self.server.expect(request.rank)
        try:
            self.attend(request.rank, FabricLink(endpoint.accept(request), request.rank))
        except BaseException:
            self.server.leave(request.rank)
            raise

    def last(self) -> None:
        """Serve until all workers have left for good."""
        while not self.server.wait_until_left(LOOK_S):
            pass

    def end_talks(self) -> None:
        """End all threads."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        for attendant in self.attendants.values():
            attendant.close()
        self.attendants.clear()

    def close(self) -> None:
        """Give back memory, which nobody may be using."""
        self.server.close()
