"""How buckets arrive: a pass is waited for as a whole, its verdict is read, and gradients are given to parameters.

Ranks also find out here that they did different things. Then they stay apart: whoever wants to go on is told again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from syncline.buckets.layout import Layout
from syncline.buckets.passes import KeptPass, Pass, Verdict, read_verdict
from syncline.buckets.sparse import average_sparse
from syncline.buckets.turns import UNSURE, Turns
from syncline.errors import Desync, PeerError
from syncline.fabric.base import Fabric
from syncline.guards.hangs import explain, explain_desync
from syncline.pipeline import Flight, Pipeline


class Receiver:
    """Waits for the buckets of a layout, and says why if they never come."""

    def __init__(
        self, fabric: Fabric, pipeline: Pipeline, layout: Layout, agree: Callable[[list[str], int], None]
    ) -> None:
        self.fabric = fabric
        self.pipeline = pipeline
        self.layout = layout
        self.agree = agree  # on what was unfrozen in a pass, with the others; all ranks come to it in the same place
        self.turns = Turns()
        self.broken: Desync | None = None  # ranks did different things, and stay apart

    # Gradients

    def receive(self, current: Pass) -> Verdict:
        """Wait for a pass, in which the gradients that parameters have are where the means come to be."""
        verdict = self.verdict_of(current, is_newest=True)
        for slot in self.layout.sparse:
            average_sparse(self.fabric, slot.parameter, current.takes_part)
        if current.takes_part:
            for bucket in self.layout.buckets:
                bucket.hand_out()
            if verdict.is_good:
                self.pipeline.handed_out(current.flights)
        return verdict

    def receive_late(self, late: Pass | KeptPass, is_newest: bool) -> Verdict:
        """Wait for a pass whose memory parameters have left since, and give its gradients to them."""
        if isinstance(late, KeptPass):
            self.layout.turn_for(late.number)
            self.layout.hand_out(late.gradients)
            return late.verdict
        verdict = self.verdict_of(late, is_newest)
        self.layout.turn_for(late.number)
        for bucket in self.layout.buckets[: len(late.flights)]:
            bucket.hand_out_all()
        if late.has_data and verdict.is_good:
            self.pipeline.handed_out(late.flights)
        return verdict

    # What ranks know of a pass

    def verdict_of(self, current: Pass, is_newest: bool) -> Verdict:
        """Known when all of it has arrived; `is_newest` if no other pass has begun since."""
        self.agree_on_unfrozen(current)
        for flight in current.flights:
            self.wait(flight, current)
        if current.ending is not None:
            current.ending.wait()
        verdict = read_verdict(current.flights)
        with self.staying_broken():
            self.turns.compare(verdict.turns, verdict.is_good, asks=current.turn == UNSURE and is_newest)
        return verdict

    def agree_on_unfrozen(self, current: Pass) -> None:
        """If a rank has unfrozen something, see that all have unfrozen the same; known when the verdict has come.

        Before buckets are made for it, or with a lag, where nobody waits for a verdict, before their means are used.
        """
        if current.has_agreed:
            return
        current.has_agreed = True
        assert self.layout.judged is not None
        judged = current.flights[: self.layout.judged.number + 1]
        for flight in judged:
            self.wait(flight, current)
        if read_verdict(judged).thawed:
            with self.staying_broken():
                self.agree(current.unfrozen, current.number)

    @contextmanager
    def staying_broken(self) -> Iterator[None]:
        """What ranks find out about each other here is said again whenever one wants to go on."""
        try:
            yield
        except Desync as error:
            self.broken = error
            raise

    def refuse_broken(self) -> None:
        """Ranks that have come apart stay so."""
        if self.broken is not None:
            raise self.broken

    # Waiting

    def wait(self, flight: Flight, current: Pass) -> None:
        """Wait for a bucket of a pass; if it never comes, say why."""
        with self.explaining(flight.number, current):
            self.pipeline.wait(flight)

    @contextmanager
    def explaining(self, bucket: int, current: Pass) -> Iterator[None]:
        """Add to the error about a peer what is known of it and of the bucket of a pass."""
        try:
            yield
        except Desync as error:
            raise explain_desync(error, current.number, bucket, self.layout.planned_names()) from None
        except PeerError as error:
            if not self.pipeline.waits_for_ranks:
                raise
            note = self.fabric.note_of(error.rank)
            raise explain(error, current.number, bucket, self.layout.planned_names(), note) from None
