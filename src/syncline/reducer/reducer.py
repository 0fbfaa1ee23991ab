"""The reducer: watches gradients come, sends full buckets off while backward goes on, and waits for them at its end.

A pass is one backward pass that ends with synchronized gradients. In the first pass nothing leaves early: the order in
which gradients come is observed, rank 0's order is taken by all, and the buckets are made for it. From then on a bucket
leaves as soon as its last gradient is there, strictly in the agreed order. At the end of backward what is left is sent
(a gradient that did not come counts as zero), the status follows, and when backward returns every gradient is the mean.

With a lag, backward does not wait for its own pass but for the one before, and returns the gradients of that of which
the optimizer stepped after it. The others were thrown away (`late.py`).

All that ranks say to each other is said in a pass, so a rank that has no more data can take part in it with nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain
from time import monotonic_ns
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.core.passes import UNSURE, PassCounter
from syncline.core.plan import Plan
from syncline.core.status import Call, OwnStatus, PassStatus
from syncline.core.torch_internals import version_of
from syncline.errors import ConfigError, Desync, FabricError, LateGradient, PeerError, SynclineError
from syncline.fabric.base import Fabric
from syncline.fabric.health import RankProgress
from syncline.guards.fingerprint import NO_FINGERPRINT, Fingerprint, digest_of
from syncline.guards.finite import first_not_finite
from syncline.guards.hangs import Doing, explain, explain_desync
from syncline.guards.unfreezing import compare_unfrozen
from syncline.path.bucket import Bucket, Slot
from syncline.path.path import Path
from syncline.path.work import PassWork
from syncline.reducer.backward import End, current_pass
from syncline.reducer.late import LateMeans
from syncline.reducer.layout import Layout
from syncline.reducer.parameters import Named
from syncline.reducer.passes import Pass, SavedPass
from syncline.reducer.sparse import average_sparse

log = logging.getLogger(__name__)


class State(Enum):
    """What the reducer is in the middle of."""

    IDLE = auto()  # there are no gradients that no step has used
    LOCAL = auto()  # there are gradients that only this rank has
    FILLING = auto()  # a backward pass is under way whose gradients are sent
    ACCUMULATING = auto()  # a backward pass is under way whose gradients stay here
    ARRIVING = auto()  # a backward pass has ended, and its means are waited for
    AT_HAND = auto()  # the means of a pass are where an optimizer finds them
    ABANDONED = auto()  # a backward pass has failed here, and the others have yet to hear of it
    BROKEN = auto()  # ranks have done different things, or one of them is gone


@dataclass(frozen=True)
class ReducerConfig:
    """How gradients are bucketed and when they are sent."""

    plan: Plan
    accumulate: int = 1
    lags_after: int | None = None  # good passes from which on backward returns the gradients of the pass before
    fixed: bool = False  # buckets follow the order of registration and not that of the first pass
    corrects: bool = False  # gradients become momenta on their way, so means are no gradients to add to
    is_scaled: bool = False  # a GradScaler looks for gradients that are not finite


class PassListener(Protocol):
    """Who works with the gradients of a reducer."""

    def fingerprint(self, number: int) -> Fingerprint:
        """The fingerprint of this replica in a pass."""

    def pass_ended(self, status: PassStatus) -> str:
        """Means have come; why they cannot be used, which all ranks see alike, or nothing."""

    def also_synchronize(self) -> None:
        """Say what else ranks say to each other in a pass."""


class Reducer:
    """Keeps the gradients of one model in step."""

    def __init__(
        self,
        fabric: Fabric,
        path: Path,
        named: Named,
        sparse_names: set[str],
        config: ReducerConfig,
        listener: PassListener,
        control: Fabric | None = None,
    ) -> None:
        """`control` carries what ranks compare beside passes; it is `fabric` where nothing lags."""
        self.fabric = fabric
        self.control = control or fabric
        self.path = path
        self.config = config
        self.listener = listener
        self.lags_after = config.lags_after
        self.layout = Layout(
            fabric,
            sparse_names,
            config.plan,
            1 if config.lags_after is None else 2,
            self.gradient_came,
            self.gradient_comes if config.lags_after is not None else None,
            self.unfrozen_came,
            path.divisor_of,
            config.fixed,
        )
        self.layout.watch_all(named)
        self.state = State.IDLE
        self.counter = PassCounter()
        self.current: Pass | None = None  # in FILLING and ACCUMULATING
        self.abandoned: Pass | None = None  # in ABANDONED
        self.ending: threading.Thread | None = None  # in ABANDONED: sends what the failed pass had not sent
        self.in_flight: Pass | SavedPass | None = None  # that the next backward will wait for
        self.stepped: set[str] = set()  # parameters whose optimizer has stepped since the newest pass
        self.late: list[LateMeans] = []  # of passes that have arrived
        self.given: dict[Slot, tuple[Tensor, int]] = {}  # gradients that a pass with a lag returned, with their version
        self.aside: dict[Slot, Tensor] = {}  # late means that were at hand when the pass began that is under way
        self.used: dict[Slot, tuple[Tensor, int]] = {}  # gradients at hand that a step has used, as it left them
        self.keeps_copies = False  # of late means, because the loop changes or zeroes in place what it is given
        self.replaced: set[Slot] = set()  # whose gradients the loop was seen to replace, as by zeroing to None
        self.failure: FabricError | None = None  # in BROKEN
        self.passes = 0
        self.ended_by_all = 0  # the last pass whose status has come
        self.last_failed = 0  # the last pass that failed on a rank, which may not step after it as others do
        self.known_from = 0  # the pass from which on every rank knows the last status that this one has read
        self.passes_before_step = 0
        self.backwards = 0  # since the last optimizer step
        self.local_versions: list[tuple[int, int]] = []  # in LOCAL: of the gradients when backward had ended
        self.is_paused = False  # by no_sync
        self.is_behind = False  # a pass failed here since the last step, and others may have stepped after it
        self.is_between_steps = False  # that the loop makes, when late means are stepped with
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

    def gradient_comes(self, slot: Slot) -> None:
        """With a lag: a gradient is about to be added to what is at hand, of which a late mean is no part."""
        if self.has_late_mean(slot):
            self.aside[slot] = self.given[slot][0]
            slot.parameter.grad = None

    def gradient_came(self, slot: Slot) -> None:
        """A gradient has been accumulated in `parameter.grad`: its bucket leaves with its last one."""
        current = self.pass_of_gradient(slot)
        if slot in self.aside:
            self.refuse_second_backward(slot)
        if not current.synchronizes:
            return
        slot.fired += 1
        if not self.layout.is_made:
            current.order.append(slot)
        elif slot.fired > slot.expected:
            self.came_again(slot, current)
        elif slot.fired == slot.expected and not slot.is_sparse:
            if not slot.is_small:
                slot.place()
            slot.bucket.missing -= 1
            if not slot.bucket.missing:
                self.send_full(current)

    def unfrozen_came(self) -> None:
        """A parameter has a gradient that needed none before; it gets a bucket at the end of the pass."""
        self.pass_of_gradient(None)

    def pass_of_gradient(self, slot: Slot | None) -> Pass:
        """The pass that a gradient belongs to, which begins with the first one."""
        current = self.current
        if current is None or current.autograd_pass != current_pass():
            return self.enter_pass(slot)
        return current

    def enter_pass(self, slot: Slot | None) -> Pass:
        """Begin a pass with the first gradient of a backward pass, or go on with it in one that is nested in it.

        The optimizer's step decides what is accumulated together: passes are counted from there, or from where their
        gradients were thrown away, and all from the last one that is accumulated on are synchronized.
        """
        if self.current is None:
            if self.config.accumulate > 1 and not self.still_accumulates(slot):
                self.backwards = 0
            self.backwards += 1
            synchronizes = not self.is_paused and self.backwards >= self.config.accumulate
            self.current = self.begin(synchronizes)
            self.state = State.FILLING if synchronizes else State.ACCUMULATING
        self.current.autograd_pass = current_pass()
        End(self.send_the_rest, self.finish_backward, self.backward_failed)
        return self.current

    def begin(self, synchronizes: bool, has_data: bool = True, late: bool = False) -> Pass:
        """Get ready for the gradients of a pass."""
        self.refuse_broken()
        for slot in self.layout.slots if self.late else []:
            self.gradient_comes(slot)
        if has_data:
            self.refuse_momentum_of_momentum()
        self.note_changes()
        self.complete_abandoned()
        if not synchronizes:
            return Pass(self.passes, synchronizes)
        waits_for_turn = self.config.is_scaled and self.stepped
        for unused in self.late:
            unused.leave_buckets(torch.inf if waits_for_turn else 0.0)
        self.passes += 1
        self.layout.turn_for(self.passes)
        for bucket in self.layout.buckets:
            bucket.begin()
        for slot in chain(self.layout.slots, self.layout.sparse):
            slot.fired = 0
        begun = Pass(self.passes, synchronizes, self.counter.next(has_data), late, self.is_tainted, self.lags)
        begun.works.append(self.path.begin(begun.number, has_data))
        for bucket in self.layout.buckets:
            bucket.divisor = self.path.divisor_of(bucket.buffer.values.dtype)
        self.publish(begun, Doing.BACKWARD)
        return begun

    def has_late_mean(self, slot: Slot) -> bool:
        """Whether a parameter has a late mean at hand, as it was handed out: none that a step has used."""
        given = self.given.get(slot)
        is_at_hand = given is not None and slot.parameter.grad is given[0]
        return is_at_hand and any(slot.name in late.means for late in self.late)

    def take_aside_back(self) -> None:
        """Let the loop find late means again after a pass that has sent nothing, and so returns none."""
        for slot, late in self.aside.items():
            slot.parameter.grad = late if slot.parameter.grad is None else slot.parameter.grad
        self.aside.clear()

    def refuse_second_backward(self, slot: Slot) -> None:
        """Refuse a gradient where late means were that no step has used, and that were not zeroed."""
        if self.aside.pop(slot).any():
            raise ConfigError(
                f"a second backward pass came before the optimizer's step, and there are gradients of {slot.name} at "
                f"hand since backward pass {self.config.accumulate}; with mode=delayed say accumulate=N, or wrap all "
                f"but the last in sync.no_sync(). Where several optimizers take turns, call zero_grad() of each right "
                f"before its own backward pass"
            )

    def refuse_momentum_of_momentum(self) -> None:
        """Gradients of another pass that are added to means would not be told from those."""
        if self.config.corrects and self.passes > self.passes_before_step and self.still_has_means():
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
        if self.state is State.LOCAL:
            return False
        return sum(bool(view.any()) for view in self.handed_out()) > 1

    def handed_out(self) -> list[Tensor]:
        """Gradients that parameters have as they were given to them: in the memory of buckets, or with a lag."""
        slots = [slot for bucket in self.layout.buckets for slot in bucket.slots]
        given = [(slot, self.given[slot][0] if slot in self.given else slot.view) for slot in slots]
        return [gradient for slot, gradient in given if slot.parameter.grad is gradient]

    def still_accumulates(self, first: Slot | None) -> bool:
        """Whether any gradient is still there that no step has used, seen when the first one of a pass has come.

        The values of those that this rank alone has say nothing: they may be zero, and all ranks must see the same.
        """
        if self.state is not State.LOCAL:
            return self.state is State.AT_HAND and self.still_has_means()
        if self.is_tainted:  # a pass that failed here has dropped them, and the other ranks count on
            return True
        versions = dict(self.local_versions)
        for slot in chain(self.layout.slots, self.layout.sparse):
            gradient = slot.parameter.grad
            if gradient is None or id(gradient) not in versions or self.has_late_mean(slot):
                continue
            if slot is not first or version_of(gradient) > versions[id(gradient)]:
                return True
        return False

    def refuse_changed_local(self) -> None:
        """Gradients of this rank alone that were changed after backward would be averaged as they are by now."""
        if not self.path.waits_for_ranks or set(self.versions()) <= set(self.local_versions):
            return
        raise ConfigError(
            f"the gradients of {self.backwards} backward pass(es) since the last step were changed before this step "
            f"(clipped?) while they were this rank's own and not means over ranks, which they become in backward pass "
            f"{self.config.accumulate} (accumulate={self.config.accumulate}) outside of sync.no_sync(); call "
            f"sync.wait() before clipping, on all ranks, where a step may come earlier, as at the end of an epoch"
        )

    def versions(self) -> list[tuple[int, int]]:
        """Other ones whenever somebody changes or replaces a gradient."""
        gradients = [slot.parameter.grad for slot in chain(self.layout.slots, self.layout.sparse)]
        return [(id(gradient), version_of(gradient)) for gradient in gradients if gradient is not None]

    # How buckets leave

    def came_again(self, slot: Slot, current: Pass) -> None:
        """More gradients than in the first pass; too late if the bucket has left, because it would be torn."""
        if slot.is_sparse or (slot.bucket.number >= current.next_bucket and not slot.is_divided):
            slot.expected = slot.fired
            return
        raise LateGradient(
            f"{slot.name} received gradient {slot.fired} of this pass after it had left or was ready to; in the first "
            f"pass that had any there were {slot.expected}. Its graph changes from step to step, and parts of it have "
            f"backward passes of their own: use checkpoint(..., use_reentrant=False), or wrap it in sync.no_sync()"
        )

    def send_full(self, current: Pass) -> None:
        """Send buckets in the agreed order, as far as they are full."""
        buckets = self.layout.buckets
        while current.next_bucket < len(buckets) and not buckets[current.next_bucket].missing:
            buckets[current.next_bucket].place_small()
            self.send(buckets[current.next_bucket], current)

    def send_from(self, first: int, current: Pass) -> None:
        """Send all buckets from this one on, with zeros for gradients that did not come."""
        for bucket in self.layout.buckets[first:]:
            if current.takes_part:
                bucket.learn()
                bucket.fill()
            else:
                bucket.clear()
            self.send(bucket, current)

    def send(self, bucket: Bucket, current: Pass) -> None:
        """Let the next bucket leave."""
        self.path.start(current.works[-1], bucket)
        current.next_bucket += 1
        current.produced += not current.failed
        self.publish(current, Doing.FAILED if current.failed else Doing.BACKWARD)

    def end_pass(self, current: Pass) -> None:
        """All buckets of a pass have left: let its status follow."""
        current.has_ended = True
        self.path.end(current.works[-1], self.own_status(current))

    def publish(self, current: Pass, doing: Doing) -> None:
        """Say how far this rank is, for those who may have to explain why they wait."""
        self.fabric.health.publish(RankProgress(current.number, current.next_bucket, current.produced, doing))

    def own_status(self, current: Pass) -> OwnStatus:
        """What this rank has to say of a pass whose buckets have left."""
        current.unfrozen = self.layout.unfrozen()
        fingerprint = self.listener.fingerprint(current.number) if current.takes_part else NO_FINGERPRINT
        own = OwnStatus(
            current.number,
            current.since_step,
            current.failed or current.is_tainted,
            current.late,
            bool(current.unfrozen),
            fingerprint.touched,
            fingerprint.digest,
        )
        own.call = current.call
        own.stepped = digest_of(sorted(self.stepped))
        own.present = present_in(current.works[-1])
        if self.path.has_residuals and self.layout.buckets and not self.sparse_are_finite(current):
            own.nonfinite.add(self.layout.buckets[-1].number)  # residuals are kept before sparse gradients are averaged
        return own

    def sparse_are_finite(self, current: Pass) -> bool:
        """Whether this rank's sparse gradients are finite."""
        named = [(slot.name, slot.parameter.grad) for slot in self.layout.sparse if slot.parameter.grad is not None]
        return not current.takes_part or not first_not_finite(named)

    # At the end of backward

    def send_the_rest(self) -> None:
        """Send whatever has not left yet, and the status; once, though every nested pass has an end."""
        current = self.current
        if current is None or not current.synchronizes or not self.layout.is_made or current.has_ended:
            return
        try:
            self.send_from(current.next_bucket, current)
            self.end_pass(current)
        except BaseException:
            self.current = None
            raise

    def finish_backward(self) -> None:
        """Wait until every gradient is the mean over ranks."""
        current, self.current = self.current, None
        if current is not None and current.synchronizes:
            self.complete(current)
        elif current is not None:
            self.state = State.LOCAL
            self.take_aside_back()
            self.local_versions = self.versions()

    def backward_failed(self) -> None:
        """An exception ended the backward pass: the others must not wait, and nobody may use this pass.

        A destructor calls this while the exception is on its way to the caller, so it only notes the failure and wakes
        a thread that sends the rest. The gradients are dropped, so that the next backward pass does not write into
        buckets that are still under way.
        """
        current, self.current = self.current, None
        if current is None:
            return
        self.drop_gradients()
        if not current.synchronizes:
            self.is_tainted = True
            self.state = State.LOCAL
            return
        current.failed = True
        self.abandoned = current
        self.state = State.ABANDONED
        name = f"rank {self.fabric.rank} ends a failed pass"
        self.ending = threading.Thread(target=self.end_abandoned, args=(current,), name=name, daemon=True)
        self.ending.start()

    def end_abandoned(self, current: Pass) -> None:
        """Send zeros for what a failed pass has not sent, and its status; nothing is waited for."""
        with suppress(SynclineError):
            self.publish(current, Doing.FAILED)
            if self.layout.is_made and not current.has_ended:
                self.send_from(current.next_bucket, current)
                self.end_pass(current)

    def wait_for_ending(self) -> None:
        """Wait until a failed pass has left; after that only this thread sends anything."""
        ending, self.ending = self.ending, None
        if ending is not None:
            ending.join()

    def drop_gradients(self) -> None:
        """The memory that they are in is not theirs any more."""
        self.aside.clear()
        self.given.clear()
        for slot in chain(self.layout.slots, self.layout.sparse):
            slot.parameter.grad = None

    # Passes

    def synchronize(self, has_data: bool = True, late: bool = False) -> PassStatus | None:
        """A pass without a backward: average what gradients there are, or take part without any.

        The status of a pass that is still in flight is not known; None.
        """
        current = self.begin(True, has_data, late)
        if self.layout.is_made:
            self.send_from(0, current)
            self.end_pass(current)
        return self.complete(current)

    def refuse_unused_gradients(self, call: str) -> None:
        """Refuse what is only possible after a step, and not while there are gradients that no step has used."""
        self.refuse_broken()
        is_used = self.state is State.AT_HAND and not any(view.any() for view in self.handed_out())
        if self.state is State.IDLE or (is_used and not self.slots_at_hand()):
            return
        raise ConfigError(
            f"{call} came while there were gradients that no step has used; call it after optimizer.step(), or after "
            f"zero_grad() has thrown them away"
        )

    def announce(self, call: Call) -> None:
        """Say in a pass without data what this rank does between two steps; raise `Desync` unless all ranks do it.

        Before the first pass there are no buckets, and what ranks do next is compared as any call is.
        """
        if not self.layout.is_made:
            self.control.barrier()
            return
        for slot in self.layout.slots:
            if slot.parameter.grad is slot.view:
                slot.parameter.grad = slot.view.clone()  # the pass writes to the memory of the bucket
        current = self.begin(True, has_data=False)
        current.call = call
        self.send_from(0, current)
        self.end_pass(current)
        self.depart(current)
        self.aside.clear()
        self.status_of(current, is_newest=True)
        self.publish(current, Doing.ELSEWHERE)

    def complete_abandoned(self) -> None:
        """Finish with the others a pass that failed here."""
        self.wait_for_ending()
        current, self.abandoned = self.abandoned, None
        if current is not None:
            self.complete(current)
            self.counter.is_sure = False
            self.is_behind = True

    def complete(self, current: Pass) -> PassStatus | None:
        """Everything that ranks say to each other at the end of a pass."""
        before, self.state = self.state, State.ARRIVING
        self.depart(current)
        status = None
        if current.lags:
            self.arrive_late()
            self.in_flight = current
        else:
            status = self.arrive(current)
        self.stepped = set()
        self.state = State.AT_HAND if current.has_data else before
        self.listener.also_synchronize()
        self.publish(current, Doing.ELSEWHERE)
        return status

    @property
    def lags(self) -> bool:
        """Whether a pass that begins now is waited for only in the next one, after a warm-up of good passes."""
        return self.lags_after is not None and self.path.good_passes >= self.lags_after

    def begin_warmup(self) -> None:
        """Count the good passes of the warm-up from here, because the mode begins here."""
        if self.config.lags_after is not None:
            self.lags_after = self.config.lags_after + self.path.good_passes

    def depart(self, current: Pass) -> None:
        """See that everything has left, also what was unfrozen in this pass."""
        if not self.layout.is_made:
            self.make_buckets_together(current)
        if self.layout.frozen:
            self.compare_unfrozen(current)
        if current.unfrozen:
            before = len(self.layout.buckets)
            self.layout.adopt_unfrozen(current.unfrozen)
            self.layout.turn_for(current.number)
            current.works.append(self.path.begin(current.number, current.has_data))
            self.send_from(before, current)
            own = OwnStatus(current.number, current.since_step, current.failed or current.is_tainted, call=current.call)
            own.present = present_in(current.works[-1])
            self.path.end(current.works[-1], own)

    def make_buckets_together(self, current: Pass) -> None:
        """At the end of the first pass; ranks wait for each other here, and not in the first bucket."""
        waited_from_ns = monotonic_ns()
        with self.explaining(current):
            self.layout.make_buckets(current.order)
        self.layout.turn_for(current.number)
        self.path.recorder.waited(waited_from_ns, monotonic_ns())
        self.send_from(0, current)
        self.end_pass(current)

    def compare_unfrozen(self, current: Pass) -> None:
        """If a rank has unfrozen something, see that all have unfrozen the same, before buckets are made for it."""
        if current.has_compared or not self.path.waits_for_ranks:
            return
        current.has_compared = True
        with self.explaining(current):
            status = self.path.wait_for_status(current.works[0])
        if status.unfrozen:
            with self.staying_broken():
                compare_unfrozen(self.control, current.unfrozen, current.number)

    def arrive(self, current: Pass) -> PassStatus:
        """Wait for a pass, in which the gradients that parameters have are where the means come to be."""
        status = self.status_of(current, is_newest=True)
        for slot in self.layout.sparse:
            average_sparse(self.fabric, slot.parameter, current.takes_part)
        if current.takes_part:
            unused = current.unused_names()
            for bucket in self.layout.buckets:
                bucket.assign_grads(unused)
            if status.is_good:
                self.note_assigned(current)
            self.is_tainted = self.is_tainted or status.failed
        self.known_from = current.number
        self.tell_listener(current, status)
        return status

    def tell_listener(self, current: Pass | SavedPass, status: PassStatus) -> str:
        """Say that a pass has ended, and count it if it can be used; why it cannot, or nothing."""
        problem = self.listener.pass_ended(status)
        if not problem and status.is_good and isinstance(current, Pass):  # a saved one has been counted
            self.path.count_good(current.works[0])
        return problem

    def arrive_late(self) -> None:
        """Wait for the pass that is in flight, if there is one; what optimizers want of it are late means from here."""
        arrived, self.in_flight = self.in_flight, None
        if arrived is None:
            return
        self.known_from = arrived.number + 1
        status, means = self.wait_for_late(arrived)
        if status.failed:
            self.last_failed = arrived.number
        problem = self.tell_listener(arrived, status)
        wanted = {name: mean for name, mean in means.items() if name in self.stepped}
        if wanted:
            self.late.append(LateMeans(arrived.number, wanted, arrived.loss_scale, problem, is_void=status.failed))

    def arrive_wanted(self) -> None:
        """Wait for the pass that is in flight; it stays so if no optimizer has stepped after it yet."""
        if self.stepped:
            self.arrive_late()
        elif isinstance(self.in_flight, Pass):
            self.status_of(self.in_flight, self.is_newest(self.in_flight))

    def wait_for_late(self, arrived: Pass | SavedPass) -> tuple[PassStatus, dict[str, Tensor]]:
        """Wait for a pass whose memory parameters have left since; its status and its means."""
        if isinstance(arrived, SavedPass):
            if self.layout.is_made:  # where it is seen whether they are finite
                self.layout.turn_for(self.passes - 1)  # not to the memory of a pass that is under way
                self.layout.copy_in(arrived.gradients)
            return arrived.status, dict(arrived.gradients)
        status = self.status_of(arrived, self.is_newest(arrived))
        self.layout.turn_for(arrived.number)
        if arrived.has_data and status.is_good:
            self.note_assigned(arrived)
        unused = arrived.unused_names()
        return status, {slot.name: slot.view for slot in self.layout.slots if slot.name not in unused}

    def frozen_under_way(self) -> set[str]:
        """Parameters that were frozen while a gradient of them was under way, so that new buckets have no place."""
        under_way = {name for late in self.late for name in late.means}
        if isinstance(self.in_flight, SavedPass):
            under_way |= self.stepped & self.in_flight.gradients.keys()
        elif self.in_flight is not None:
            under_way |= self.stepped
        return under_way - {slot.name for slot in self.layout.slots if slot.parameter.requires_grad}

    def refuse_frozen(self) -> None:
        """Refuse to go on with other buckets where that would lose gradients."""
        if frozen := self.frozen_under_way():
            raise ConfigError(
                f"{min(frozen)} was frozen while a gradient of it was under way, which would be lost; with "
                f"mode=delayed call sync.drain() on all ranks before that, or before this"
            )

    # Late means

    def hand_out(self, loss_scale: float) -> None:
        """Give parameters their late means, and nothing to others: what they had is under way, or has been used."""
        self.drop_gradients()
        for late in self.late:
            late.is_shown = True
            late.rescale(loss_scale)
            for slot in self.layout.slots:
                if slot.name in late.means:
                    mean = late.means[slot.name]
                    self.give(slot, mean.clone() if self.keeps_copies or slot not in self.replaced else mean)

    def give(self, slot: Slot, gradient: Tensor) -> None:
        """Let the loop find this gradient, and see later whether it has changed it."""
        slot.parameter.grad = gradient
        self.given[slot] = gradient, version_of(gradient)

    def slots_at_hand(self) -> list[Slot]:
        """Slots of parameters that have what the newest pass gave them, with which the loop may yet step."""
        if self.state is not State.AT_HAND:
            return []
        return [slot for slot, (one, version) in self.given.items() if is_untouched(slot, one, version)]

    def used_at_hand(self) -> list[Slot]:
        """Slots of parameters whose gradients at hand a step has used already: no backward pass has come since."""
        is_between = self.state in (State.IDLE, State.AT_HAND) and self.passes == self.passes_before_step
        if not is_between or not isinstance(self.in_flight, Pass):
            return []
        at_hand = [(slot, *used) for slot, used in self.used.items() if slot.parameter.grad is used[0]]
        return [slot for slot, one, version in at_hand if version_of(one) == version or one.any()]  # not zeroed since

    def hand_over(self, slots: Iterable[Slot]) -> None:
        """Give parameters their means of the pass in flight at once, for a step that comes when nothing lags."""
        arrived = self.in_flight
        if not isinstance(arrived, Pass) or not self.status_of(arrived, self.is_newest(arrived)).is_good:
            return
        self.layout.turn_for(arrived.number)
        unused = arrived.unused_names()
        for slot in slots:
            slot.parameter.grad = slot.view.clone() if slot.name not in unused else None

    def note_changes(self) -> None:
        """See whether the loop has changed gradients that it was given in place, as one does that zeroes them so.

        From then on late means are copied for it, as they are until it was seen to replace them. One that was no copy
        and is changed already is lost, if no step has used it.
        """
        changed = self.changed()
        self.keeps_copies = self.keeps_copies or bool(changed)
        self.drop_late({slot.name for slot in changed if self.is_no_copy(slot)})
        at_hand = {slot for slot, (one, _) in self.given.items() if slot.parameter.grad is one}
        self.replaced |= self.given.keys() - at_hand - self.aside.keys() - changed
        self.given = {slot: self.given[slot] for slot in self.aside}
        self.used.clear()

    def is_no_copy(self, slot: Slot) -> bool:
        """Whether the loop was given the late mean itself."""
        return any(late.means.get(slot.name) is self.given[slot][0] for late in self.late)

    def changed(self) -> set[Slot]:
        """Slots of parameters whose gradients the loop has changed in place since it was given them."""
        return {slot for slot, (gradient, version) in self.given.items() if version_of(gradient) != version}

    def drop_late(self, names: set[str]) -> None:
        """Forget the late means of these parameters."""
        for late in self.late:
            late.drop(names)
        self.late = [late for late in self.late if late.means]

    def late_means_of(self, optimizer: Optimizer) -> LateMeans | None:
        """What the next step of an optimizer is for."""
        names = {slot.name for slot in self.layout.slots_of(optimizer)}
        return next((late for late in self.late if not names.isdisjoint(late.means)), None)

    def use(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: with its late means, if it had any, and after the pass that is in flight."""
        if self.lags_after is None:
            return
        names = {slot.name for slot in self.layout.slots_of(optimizer)}
        self.drop_late(names)
        self.stepped = self.stepped | names
        for slot in self.layout.slots_of(optimizer):
            if slot.parameter.grad is not None:
                self.used[slot] = slot.parameter.grad, version_of(slot.parameter.grad)

    def give_zeros(self, optimizer: Optimizer) -> None:
        """Give parameters of an optimizer zeros, if they had a gradient on this rank in the newest pass."""
        own = set(self.layout.slots_of(optimizer))
        for bucket in self.layout.buckets:
            for slot, is_present in zip(bucket.slots, bucket.present, strict=True):
                if is_present and slot in own:
                    self.give(slot, torch.zeros_like(slot.parameter))

    def note_assigned(self, current: Pass) -> None:
        """Means are where they are used from now on."""
        for work in current.works:
            self.path.grads_assigned(work)

    def status_of(self, current: Pass, is_newest: bool) -> PassStatus:
        """The status of a pass that has arrived; `is_newest` if no other pass has begun since."""
        with self.explaining(current):
            first, *others = [self.path.wait(work) for work in current.works]
        self.ended_by_all = current.number
        status = first
        if others:
            nonfinite = tuple(number for one in (first, *others) for number in one.nonfinite)
            status = replace(first, nonfinite=nonfinite)
        with self.staying_broken():
            if self.path.waits_for_ranks:
                status.refuse_different_calls()
                if self.last_failed != current.number - 1:
                    status.refuse_different_steps()
            has_stepped = self.passes_before_step >= current.number
            asks = current.since_step == UNSURE and is_newest and not has_stepped
            self.counter.compare(status.since_step, status.is_good, asks)
        return status

    def is_newest(self, one: Pass | SavedPass) -> bool:
        """Whether no other pass has begun since."""
        return one.number == self.passes

    # What goes wrong between ranks

    @contextmanager
    def staying_broken(self) -> Iterator[None]:
        """What ranks find out about each other here is said again whenever one wants to go on."""
        try:
            yield
        except Desync as error:
            self.failure = error
            self.state = State.BROKEN
            raise

    def refuse_broken(self) -> None:
        """Ranks that have come apart stay so."""
        if self.state is State.BROKEN and self.failure is not None:
            raise self.failure

    @contextmanager
    def explaining(self, current: Pass) -> Iterator[None]:
        """Add to the error about a peer what is known of it and of the bucket; an interrupted pass ends for all."""
        try:
            yield
        except Desync as error:
            raise explain_desync(error, current.number, self.missing(current), self.layout.planned_names()) from None
        except PeerError as error:
            if not self.path.waits_for_ranks:
                raise
            progress = self.fabric.health.progress_of(error.rank)
            missing, names = self.missing(current), self.layout.planned_names()
            raise explain(error, current.number, missing, names, progress, self.ended_by_all) from None
        except FabricError:
            raise
        except BaseException as error:
            self.fabric.abort(f"was interrupted in pass {current.number} by {type(error).__name__}")
            raise

    def missing(self, current: Pass) -> int:
        """Number of the first bucket of a pass that has not arrived."""
        return next((self.path.first_missing(work) for work in current.works if not work.is_complete), 0)

    # To be saved and restored

    def state_dict(self) -> dict[str, Any]:
        """The buckets, the number of passes, and the means of a pass that is in flight, which are waited for."""
        in_flight = self.saved_pass()  # whose residuals count as committed
        return self.layout.state_dict() | {
            "passes": self.passes,
            "good_passes": self.path.good_passes,
            "lags_after": self.lags_after,
            "in_flight": in_flight,
            "stepped": sorted(self.stepped),
            "late": [late.state_dict() for late in self.late],
            "keeps_copies": self.keeps_copies or bool(self.changed()),
        }

    def saved_pass(self) -> dict[str, Any] | None:
        """What is in flight, waited for, as it can be saved."""
        if isinstance(self.in_flight, Pass):
            status = self.status_of(self.in_flight, self.is_newest(self.in_flight))
            return SavedPass.of(self.in_flight, status).state_dict()
        return self.in_flight.state_dict() if self.in_flight is not None else None

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self.passes = self.passes_before_step = self.ended_by_all = saved["passes"]
        self.path.good_passes = saved["good_passes"]
        if self.config.lags_after is not None and saved["lags_after"] is not None:
            self.lags_after = saved["lags_after"]
        self.counter.begin()
        in_flight = saved["in_flight"]
        self.in_flight = SavedPass.restored(in_flight) if in_flight else None
        self.stepped = set(saved["stepped"])
        self.late = [LateMeans.restored(late) for late in saved["late"]]
        self.keeps_copies = saved["keeps_copies"]
        if frozen := self.frozen_under_way():
            log.warning(
                "%s is frozen now: its gradient that was under way when the state was saved is lost", min(frozen)
            )
            self.drop_late(frozen)
            self.stepped -= frozen
        self.layout.restore(saved)

    # Around the optimizer's step

    def before_step(self, late: bool = True) -> None:
        """See that a step uses nothing but synchronized gradients, and that every rank has taken part in a pass.

        It is `late` for that in the step itself, because others may have clipped what this rank is yet to get.
        """
        self.refuse_broken()
        for bucket in self.layout.buckets:
            bucket.refuse_converted(bucket.slots[:1])  # a model that was converted has told nobody of its gradients
        self.complete_abandoned()
        if self.state is State.LOCAL and late:
            self.refuse_changed_local()
        if self.state is State.LOCAL or self.passes == self.passes_before_step:
            self.synchronize(late=late)

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has made its step."""
        self.use(optimizer)
        if not self.is_between_steps:
            self.counter.begin()
            self.is_behind = False
        self.backwards = 0
        self.is_tainted = False
        self.passes_before_step = self.passes
        if self.state is State.AT_HAND:
            self.state = State.IDLE

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """A step inside is none of the user's loop: what that has begun to accumulate, and its counts, stay."""
        counts = self.backwards, self.passes_before_step, self.is_tainted and self.abandoned is None
        state, stepped = self.state, self.stepped if self.abandoned is None else set()
        own = [(slot.parameter, slot.parameter.grad) for slot in self.layout.slots] if state is State.LOCAL else []
        self.is_between_steps = True
        try:
            yield
        finally:
            self.is_between_steps = False
        self.backwards, self.passes_before_step, self.is_tainted = counts
        self.stepped = stepped
        if state is State.LOCAL:
            self.state = state
        for parameter, gradient in own:
            parameter.grad = gradient

    def close(self) -> None:
        """Stop watching."""
        self.wait_for_ending()
        self.layout.close()
        self.path.close()


def is_untouched(slot: Slot, given: Tensor, version: int) -> bool:
    """Whether a parameter has the gradient that it was given, and nobody has changed it."""
    return slot.parameter.grad is given and version_of(given) == version


def present_in(work: PassWork) -> list[int]:
    """Of every parameter in the buckets of a pass, whether this rank has a gradient of it."""
    return [one for bucket_work in work.works for one in bucket_work.bucket.present]
