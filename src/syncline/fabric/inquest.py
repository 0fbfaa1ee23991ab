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
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.errors import FabricClosed, PeerError
from syncline.fabric.blame import Kind, culprit, peer_error

PATIENCE_S = 0.8  # for reports of ranks that are still being woken
TELLING_S = 0.05  # that a rank which aborts waits for the store
PAUSE_S = 0.02
LINGER_S = 4.0  # for which the rank that keeps the store does not end, while others have not reported
NEVER_SENT = 1  # a tag that no message has


class Inquest:
    """One rank's part in finding the culprit."""

    def __init__(
        self, find_group: Callable[[], dist.ProcessGroup], rank: int, world: int, keeper: int | None = None
    ) -> None:
        """`keeper`: the rank that keeps the store, if one of these does."""
        self.find_group = find_group
        self.rank = rank
        self.world = world
        self.keeper = keeper
        self.held_at = -math.inf
        self.store_says: Literal["nothing", "an error", "something"] = "something"
        self.reports: dict[int, tuple[int | None, Kind]] = {}

    def hold(self, peer: int | None, kind: Kind, during: str, waited_s: float) -> PeerError:
        """Report, wake the others, hear their reports, and return the error that names the culprit."""
        self.reports[self.rank] = (peer, kind)
        self.held_at = time.monotonic()
        # The store may itself be on the rank that is stopped, so nobody waits for it without a limit.
        hearing = threading.Thread(target=self._hear, args=(peer, kind), daemon=True)
        with suppress(RuntimeError):  # there are no new threads when the interpreter is about to end
            self.store_says = "nothing"
            hearing.start()
            hearing.join(2 * PATIENCE_S)
        if self.store_says != "something":
            self.give_up_connections()
        guilty, how = self.verdict(peer, kind)
        return peer_error(how, guilty, self.rank, during, waited_s)

    def tell_abort(self) -> None:
        """Report that this rank gives up for a reason of its own, and wake the others at once."""
        self.reports[self.rank] = (self.rank, "aborted")
        self.held_at = time.monotonic()
        telling = threading.Thread(target=self._tell_abort, daemon=True)
        with suppress(RuntimeError):  # there are no new threads when the interpreter is about to end
            telling.start()
            telling.join(TELLING_S)
        self.give_up_connections()

    def _tell_abort(self) -> None:
        with suppress(RuntimeError, FabricClosed):
            self._store().set(str(self.rank), json.dumps(self.reports[self.rank]))

    def verdict(self, peer: int | None, kind: Kind) -> tuple[int, Kind]:
        """The end of the chain; where an engine did not say who failed, the lowest rank that made no report."""
        if self.store_says != "something" and self.keeper is not None and self.keeper not in self.reports:
            return self.keeper, "lost" if self.store_says == "an error" else "stalled"
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

    def _hear(self, peer: int | None, kind: Kind) -> None:
        """Report and collect reports until all but one rank have spoken or patience ends."""
        try:
            store = self._store()
            store.set(str(self.rank), json.dumps([peer, kind]))
            self.store_says = "something"
            self.give_up_connections()
            self._collect_until(store, time.monotonic() + PATIENCE_S)
        except (RuntimeError, FabricClosed):
            self.store_says = "an error"

    def linger(self) -> None:
        """Keep the store for those who have not reported yet: without it they would take this rank for the culprit."""
        if self.keeper == self.rank and time.monotonic() < self.held_at + LINGER_S:
            with suppress(RuntimeError, FabricClosed):
                self._collect_until(self._store(), self.held_at + LINGER_S)

    def _store(self) -> Store:
        return PrefixStore("syncline/inquest", self.find_group().get_group_store())

    def _collect_until(self, store: Store, until: float) -> None:
        while len(self.reports) < self.world - 1 and time.monotonic() < until:
            self._collect(store)
            time.sleep(PAUSE_S)

    def _collect(self, store: Store) -> None:
        for rank in range(self.world):
            if rank not in self.reports and store.check([str(rank)]):
                whom, how = json.loads(store.get(str(rank)))
                self.reports[rank] = (whom, how)

    def give_up_connections(self) -> None:
        """Wake whoever waits for this rank.

        Gloo cannot be told to abort, but it closes all connections of a group when one wait times out: so one does.
        """
        group = self.find_group()
        with suppress(RuntimeError, NotImplementedError):
            group.abort()
        for peer in (rank for rank in range(self.world) if rank != self.rank):
            with suppress(RuntimeError):  # from one that is gone it fails without waiting, so all are tried
                nothing = torch.empty(1, dtype=torch.uint8)
                group.recv([nothing], peer, NEVER_SENT).wait(timedelta(milliseconds=1))
