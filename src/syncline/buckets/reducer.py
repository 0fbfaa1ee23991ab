"""The reducer: watches gradients come, sends full buckets off while backward goes on, and waits for them at its end.

A pass is one backward pass that ends with synchronized gradients. In the first pass nothing leaves early: the order in
which gradients come is observed, rank 0's order is taken by all, and the buckets are made for it. From then on a bucket
leaves as soon as its last gradient is there, strictly in the agreed order. At the end of backward what is left is sent
(a gradient that did not come counts as zero), and when backward returns every gradient is the mean over ranks.

With a lag, backward does not wait for its own pass but for the one before, and returns its gradients.

All that ranks say to each other is said in a pass, so a rank that has no more data can take part in it with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import monotonic_ns
from typing import Any

from syncline.buckets.backward import End, current_pass
from syncline.buckets.bucket import Slot
from syncline.buckets.layout import Layout
from syncline.buckets.parameters import Named
from syncline.buckets.passes import KeptPass, Pass, Verdict, read_verdict
from syncline.buckets.receiving import Receiver
from syncline.buckets.sending import Sender
from syncline.errors import ConfigError, SynclineError
from syncline.fabric.base import Fabric
from syncline.guards.fingerprint import NO_FINGERPRINT, Fingerprint
from syncline.guards.hangs import Doing
from syncline.pipeline import Pipeline


@dataclass(frozen=True)
class Shape:
    """How gradients are bucketed and when they are sent."""

    first_bucket_bytes: int
    bucket_bytes: int
    accumulate: int = 1
    lags_after: int | None = None  # passes from which on backward returns the gradients of the pass before
    fixed: bool = False  # buckets follow the order of registration and not that of the first pass
    corrects: bool = False  # gradients become momenta on their way, so means are no gradients to add to


class Reducer:
    """Keeps the gradients of one model in step."""

    def __init__(
        self,
        fabric: Fabric,
        pipeline: Pipeline,
        named: Named,
        sparse_names: set[str],
        shape: Shape,
        arrived: Callable[[Verdict], None],
        together: Callable[[], None],
        agree: Callable[[list[str], int], None],
        fingerprint: Callable[[int], Fingerprint] = lambda _: NO_FINGERPRINT,
    ) -> None:
        self.fabric = fabric
        self.pipeline = pipeline
        self.shape = shape
        self.arrived = arrived  # told of the verdict when gradients have been handed out
        self.together = together  # what else ranks say to each other in a pass
        sides = 1 if shape.lags_after is None else 2
        self.layout = Layout(
            fabric,
            sparse_names,
            shape.first_bucket_bytes,
            shape.bucket_bytes,
            sides,
            self.gradient_came,
            self.thawed,
            pipeline.divisor_of,
            shape.fixed,
        )
        self.layout.adopt(named)
        self.sender = Sender(fabric, pipeline, self.layout, fingerprint)
        self.receiver = Receiver(fabric, pipeline, self.layout, agree)
        self.current: Pass | None = None
        self.abandoned: Pass | None = None  # failed here, and not yet completed with the others
        self.under_way: Pass | KeptPass | None = None  # whose gradients the next backward will return
        self.passes = 0
        self.known_from = 0  # the pass from which on every rank knows the last verdict that this one has read
        self.passes_before_step = 0
        self.backwards = 0  # since the last optimizer step
        self.is_paused = False  # by no_sync
        self.has_unsent = False  # gradients that only this rank has
        self.has_means = False  # gradients that no step has used yet are those of all ranks
        self.is_tainted = False  # by a backward pass that failed since the last step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes that begin inside send nothing."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    # During backward

    def gradient_came(self, slot: Slot) -> None:
        """A gradient has been accumulated in `parameter.grad`."""
        current = self.pass_of_gradient()
        if not current.synchronizes:
            return
        slot.fired += 1
        if self.layout.judged:
            self.sender.gradient_came(slot, current)
        else:
            current.order.append(slot)

    def thawed(self) -> None:
        """A parameter has a gradient that needed none before; it gets a bucket at the end of the pass."""
        self.pass_of_gradient()

    def pass_of_gradient(self) -> Pass:
        """The pass that a gradient belongs to, which begins with the first one."""
        current = self.current
        if current is None or current.autograd_pass != current_pass():
            return self.enter_pass()
        return current

    def enter_pass(self) -> Pass:
        """The first gradient of a backward pass, or of one that is nested in it."""
        if self.current is None:
            self.backwards += 1
            self.current = self.begin(synchronizes=not self.is_paused and self.backwards % self.shape.accumulate == 0)
        self.current.autograd_pass = current_pass()
        End(self.send_the_rest, self.finish_backward, self.backward_failed)
        return self.current

    def begin(self, synchronizes: bool, has_data: bool = True, late: bool = False) -> Pass:
        """Get ready for the gradients of a pass."""
        self.receiver.refuse_broken()
        self.refuse_what_lags_badly()
        if has_data:
            self.refuse_momentum_of_momentum()
        self.complete_abandoned()
        if not synchronizes:
            self.has_unsent = True
            return Pass(self.passes, synchronizes)
        self.passes += 1
        self.layout.turn_for(self.passes)
        for bucket in self.layout.buckets:
            bucket.begin()
        for slot in chain(self.layout.slots, self.layout.sparse):
            slot.fired = 0
        begun = Pass(self.passes, synchronizes, self.receiver.turns.next(has_data), late, self.is_tainted)
        self.sender.tell(begun, Doing.BACKWARD)
        return begun

    def refuse_what_lags_badly(self) -> None:
        """With a lag, gradients that were handed out are not part of the next pass."""
        if self.shape.lags_after is None:
            return
        if self.abandoned is not None:
            raise ConfigError(
                "a backward pass failed and what was under way before it was not applied; call sync.drain() before "
                "the next one, or call the model itself and not its parts"
            )
        if self.has_means and self.under_way is not None and self.still_has_means():
            raise ConfigError(
                "a second backward pass came before the optimizer's step; with mode=delayed say accumulate=N, or wrap "
                "all but the last in sync.no_sync()"
            )

    def refuse_momentum_of_momentum(self) -> None:
        """Gradients of another pass that are added to means would not be told from those."""
        if self.shape.corrects and self.passes > self.passes_before_step and self.still_has_means():
            raise ConfigError(
                "a second backward pass came before the optimizer's step, and the first one's gradients are momenta by "
                "now, of which the codec would make momenta again; say accumulate=N, or wrap all but the last in "
                "sync.no_sync()"
            )

    def still_has_means(self) -> bool:
        """Whether gradients that were handed out were not zeroed since, as they are by a loop that leaves out a step.

        One that is not zero may be the one that has just come. Where this rank has gradients of its own by now, means
        were looked for when the first of those came.
        """
        if self.has_unsent:
            return False
        handed_out = [slot.view for slot in self.layout.slots if slot.parameter.grad is slot.view]
        return sum(bool(view.any()) for view in handed_out) > 1

    # At the end of backward

    def send_the_rest(self) -> None:
        """Whatever has not left yet."""
        current = self.current
        if current is None or not current.synchronizes or not self.layout.judged:
            return
        try:
            self.sender.send_from(current.next_bucket, current)
        except BaseException:
            self.current = None
            raise

    def finish_backward(self) -> None:
        """Wait until every gradient is the mean over ranks."""
        current, self.current = self.current, None
        if current is not None and current.synchronizes:
            self.complete(current)

    def backward_failed(self) -> None:
        """An exception ended the backward pass: the others must not wait, and nobody may use this pass.

        This is called while the exception is on its way to the caller, so nothing is waited for here. The gradients
        are dropped, so that the next backward pass does not write into buckets that are still under way.
        """
        current, self.current = self.current, None
        if current is None:
            return
        self.drop_gradients()
        if not current.synchronizes:
            self.is_tainted = True
        else:
            current.failed = True
            self.abandoned = current
            with suppress(SynclineError):
                self.sender.tell(current, Doing.FAILED)
                if self.layout.judged:
                    self.sender.send_from(current.next_bucket, current)

    def drop_gradients(self) -> None:
        """The memory that they are in is not theirs any more."""
        for slot in chain(self.layout.slots, self.layout.sparse):
            slot.parameter.grad = None

    # Passes

    def synchronize(self, has_data: bool = True, late: bool = False) -> Verdict | None:
        """A pass without a backward: average what gradients there are, or keep the others company without any.

        The verdict of a pass that is still under way is not known; None.
        """
        current = self.begin(True, has_data, late)
        if self.layout.judged:
            self.sender.send_from(0, current)
        return self.complete(current)

    def complete_abandoned(self) -> None:
        """Finish with the others a pass that failed here."""
        current, self.abandoned = self.abandoned, None
        if current is not None:
            self.complete(current)

    def complete(self, current: Pass) -> Verdict | None:
        """Everything that ranks say to each other at the end of a pass."""
        self.depart(current)
        verdict = None
        if self.lags(current):
            self.arrive_late()
            self.under_way = current
        else:
            verdict = self.arrive(current)
        if current.has_data:
            self.has_unsent = False
        self.together()
        self.sender.tell(current, Doing.ELSEWHERE)
        return verdict

    def lags(self, current: Pass) -> bool:
        """Whether it is waited for only in the next pass."""
        return self.shape.lags_after is not None and current.number > self.shape.lags_after

    def depart(self, current: Pass) -> None:
        """See that everything has left."""
        if not self.layout.judged:
            self.make_buckets_together(current)
        if self.layout.frozen and not self.lags(current):
            self.receiver.agree_on_unfrozen(current)
        if current.unfrozen:
            before = len(self.layout.buckets)
            self.layout.adopt_unfrozen(current.unfrozen)
            self.layout.turn_for(current.number)
            self.sender.send_from(before, current)
        is_good = partial(lambda flights: read_verdict(flights).is_good, current.flights)
        current.ending = self.pipeline.finish(current.flights, is_good)

    def make_buckets_together(self, current: Pass) -> None:
        """At the end of the first pass; ranks wait for each other here, and not in the first bucket."""
        waited_from_ns = monotonic_ns()
        with self.receiver.explaining(0, current):
            self.layout.make_buckets(current.order)
        self.layout.turn_for(current.number)
        self.pipeline.recorder.waited(waited_from_ns, monotonic_ns())
        self.sender.send_from(0, current)

    def arrive(self, current: Pass) -> Verdict:
        """Wait for a pass."""
        verdict = self.receiver.receive(current)
        if current.takes_part:
            self.is_tainted = self.is_tainted or verdict.failed
        self.known_from = current.number
        self.arrived(verdict)
        return verdict

    def arrive_late(self) -> None:
        """Wait for the pass that is under way, if there is one, and give its gradients to the parameters."""
        late, self.under_way = self.under_way, None
        self.drop_gradients()
        self.has_means = late is not None
        if late is not None:
            self.known_from = late.number + 1
            self.arrived(self.receiver.receive_late(late, self.is_newest(late)))

    def is_newest(self, one: Pass | KeptPass) -> bool:
        """Whether no other pass has begun since."""
        return one.number == self.passes

    # To be saved and restored

    def state_dict(self) -> dict[str, Any]:
        """The buckets, the number of passes, and the means of a pass that is under way, which are waited for."""
        return self.layout.state_dict() | {"passes": self.passes, "under_way": self.saved_pass()}

    def saved_pass(self) -> dict[str, Any] | None:
        """What is under way, waited for, as it can be saved."""
        if isinstance(self.under_way, Pass):
            verdict = self.receiver.verdict_of(self.under_way, self.is_newest(self.under_way))
            return KeptPass.of(self.under_way, verdict).state_dict()
        return self.under_way.state_dict() if self.under_way is not None else None

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from there."""
        self.passes = self.passes_before_step = saved["passes"]
        self.receiver.turns.begin()
        under_way = saved["under_way"]
        self.under_way = KeptPass.restored(under_way) if under_way else None
        self.layout.restore(saved)

    # Around the optimizer's step

    def before_step(self, late: bool = True) -> None:
        """See that a step uses nothing but synchronized gradients, and that every rank has taken part in a pass.

        It is `late` for that in the step itself, because others may have clipped what this rank is yet to get.
        """
        self.receiver.refuse_broken()
        self.complete_abandoned()
        if self.has_unsent or self.passes == self.passes_before_step:
            self.synchronize(late=late)

    def after_step(self) -> None:
        """The optimizer has made its step."""
        self.receiver.turns.begin()
        self.backwards = 0
        self.is_tainted = False
        self.has_means = False
        self.passes_before_step = self.passes

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """A step inside is none of the user's loop: what that has begun to accumulate, and its counts, stay."""
        counts = self.backwards, self.passes_before_step, self.is_tainted and self.abandoned is None
        own = [(slot.parameter, slot.parameter.grad) for slot in self.layout.slots] if self.has_unsent else []
        yield
        self.backwards, self.passes_before_step, self.is_tainted = counts
        for parameter, gradient in own:
            parameter.grad = gradient

    def close(self) -> None:
        """Stop watching."""
        self.layout.close()
        self.pipeline.close()
