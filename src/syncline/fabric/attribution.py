"""After a failed message, ranks find out together who is to blame, through the process group's store.

Everyone who fails reports whom it was waiting for and gives up its connections, which wakes those who wait for it. The
one who made no report, at the end of the chain of reports, is to blame. A report is made once: the group is unusable
from then on. Where a rank keeps the store, and the store does not answer, it is that rank.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.errors import FabricClosed, PeerError
from syncline.fabric.health import Kind, culprit, peer_error

PATIENCE_S = 0.8  # for reports of ranks that are still being woken
TELLING_S = 0.05  # that a rank which aborts waits for the store
PAUSE_S = 0.02
LINGER_S = 4.0  # for which the rank that keeps the store does not end, while others have not reported


class FailureAttribution:
    """One rank's part in finding the culprit."""

    def __init__(
        self,
        find_store: Callable[[], Store],
        give_up_connections: Callable[[], None],
        announce: Callable[[Kind], None],
        rank: int,
        world: int,
        keeper: int | None = None,
    ) -> None:
        """`announce` wakes those who wait for a third rank; `keeper` is the rank that keeps the store, if any is."""
        self.find_store = find_store
        self.give_up_connections = give_up_connections
        self.announce = announce
        self.rank = rank
        self.world = world
        self.keeper = keeper
        self.reported_at = -math.inf
        self.has_store = True  # it has answered
        self.store_error = False
        self.reports: dict[int, tuple[int | None, Kind]] = {}

    def blame(self, peer: int | None, kind: Kind, during: str, waited_s: float) -> PeerError:
        """Report, wake the others, hear their reports, and return the error that names the culprit."""
        # The store may itself be on the rank that is stopped, so nobody waits for it without a limit.
        self.has_store, self.store_error = False, False
        self._report(peer, kind, 2 * PATIENCE_S, lambda: self._hear(peer, kind))
        if not self.has_store:
            self.give_up_connections()
        guilty, how = self.verdict(peer, kind)
        return peer_error(how, guilty, self.rank, during, waited_s)

    def abort(self) -> None:
        """Report that this rank gives up for a reason of its own, announce it, and wake those who wait for it."""

        def tell() -> None:
            with suppress(RuntimeError, FabricClosed):
                self._store().set(str(self.rank), json.dumps([self.rank, "aborted"]))
                self.announce("aborted")

        self._report(self.rank, "aborted", TELLING_S, tell)
        self.give_up_connections()

    def verdict(self, peer: int | None, kind: Kind) -> tuple[int, Kind]:
        """The end of the chain; where an engine did not say who failed, the lowest rank that made no report."""
        if not self.has_store and self.keeper is not None and self.keeper not in self.reports:
            return self.keeper, "lost" if self.store_error else "stalled"
        aborted = [rank for rank, (_, how) in self.reports.items() if how == "aborted"]
        if aborted:
            return aborted[0], "aborted"
        silent = [rank for rank in range(self.world) if rank not in self.reports]
        if peer is None:
            peer = silent[0] if silent else (self.rank + 1) % self.world
        guilty = culprit(peer, lambda rank: self.reports.get(rank, (None, kind))[0])
        if guilty in self.reports and silent:  # those who were woken by its end blame each other
            lost = any(how == "lost" for _, how in self.reports.values())
            return silent[0], "lost" if lost else kind
        seen = [how for whom, how in self.reports.values() if whom == guilty]
        if "lost" in seen:
            return guilty, "lost"
        return guilty, seen[0] if seen else kind

    def linger(self) -> None:
        """Keep the store for those who have not reported yet: without it they would take this rank for the culprit."""
        if self.keeper == self.rank and time.monotonic() < self.reported_at + LINGER_S:
            with suppress(RuntimeError, FabricClosed):
                self._collect_until(self._store(), self.reported_at + LINGER_S)

    def _report(self, peer: int | None, kind: Kind, patience_s: float, tell: Callable[[], None]) -> None:
        """Let a thread tell the others, and wait for it as long as patience lasts."""
        self.reports[self.rank] = (peer, kind)
        self.reported_at = time.monotonic()
        telling = threading.Thread(target=tell, daemon=True)
        with suppress(RuntimeError):  # there are no new threads when the interpreter is about to end
            telling.start()
            telling.join(patience_s)

    def _hear(self, peer: int | None, kind: Kind) -> None:
        """Report and collect reports until all but one rank have spoken or patience ends."""
        try:
            store = self._store()
            store.set(str(self.rank), json.dumps([peer, kind]))
            self.has_store = True
            self.announce(kind)
            self.give_up_connections()
            self._collect_until(store, time.monotonic() + PATIENCE_S)
        except (RuntimeError, FabricClosed):
            self.has_store, self.store_error = False, True

    def _store(self) -> Store:
        return PrefixStore("syncline/attribution", self.find_store())

    def _collect_until(self, store: Store, until: float) -> None:
        while len(self.reports) < self.world - 1 and time.monotonic() < until:
            self._collect(store)
            time.sleep(PAUSE_S)

    def _collect(self, store: Store) -> None:
        for rank in range(self.world):
            if rank not in self.reports and store.check([str(rank)]):
                whom, how = json.loads(store.get(str(rank)))
                self.reports[rank] = (whom, how)
