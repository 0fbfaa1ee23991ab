"""The reducer: watches gradients come, sends full buckets off while backward goes on, and waits for them at its end.

A pass is one backward pass that ends with synchronized gradients. In the first pass nothing leaves early: the order in
which gradients come is observed, rank 0's order is taken by all, and the buckets are made for it. From then on a bucket
leaves as soon as its last gradient is there, strictly in the agreed order. At the end of backward what is left is sent
(a gradient that did not come counts as zero), and when backward returns every gradient is the mean over ranks.

All that ranks say to each other is said in a pass, so a rank that has no more data can take part in it with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic_ns
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from syncline.buckets.assign import Item, assign
from syncline.buckets.backward import End, current_pass
from syncline.buckets.bucket import Bucket, Slot
from syncline.buckets.parameters import Named
from syncline.buckets.sparse import average_sparse
from syncline.errors import LateGradient, PeerError, SynclineError
from syncline.fabric.base import Fabric
from syncline.guards.hangs import explain
from syncline.pipeline import Flight, Pipeline


@dataclass(frozen=True)
class Verdict:
    """What all ranks know at the end of a pass."""

    failed: bool  # a rank failed in its backward pass, so the gradients mean nothing
    bad: tuple[int, ...]  # buckets that were not finite on some rank before they were encoded
    active: tuple[int, ...]  # ranks that took part with data

    @property
    def is_good(self) -> bool:
        """Whether the gradients can be used."""
        return not self.failed and not self.bad


@dataclass
class Pass:
    """One backward pass of this rank, as far as it has come."""

    synchronizes: bool  # whether gradients are sent in it
    has_data: bool = True  # False for a rank that only keeps the others company
    failed: bool = False  # an exception ended it, so nobody may use it
    autograd_pass: int = -1  # the engine's number, which changes in nested ones
    next_bucket: int = 0
    flights: list[Flight] = field(default_factory=list)
    order: list[Slot] = field(default_factory=list)  # in which gradients came; only of the first pass


class Reducer:
    """Keeps the gradients of one model in step."""

    def __init__(
        self,
        fabric: Fabric,
        pipeline: Pipeline,
        named: Named,
        sparse_names: set[str],
        first_bucket_bytes: int,
        bucket_bytes: int,
        accumulate: int,
        at_the_end: Callable[[Verdict], None],
    ) -> None:
        self.fabric = fabric
        self.pipeline = pipeline
        self.sparse_names = sparse_names
        self.first_bucket_bytes = first_bucket_bytes
        self.bucket_bytes = bucket_bytes
        self.accumulate = accumulate
        self.at_the_end = at_the_end  # of a pass: what else ranks say to each other
        self.frozen: Named = []
        self.slots: list[Slot] = []
        self.sparse: list[Slot] = []
        self.buckets: list[Bucket] = []
        self.judged: Bucket | None = None  # the bucket that carries the verdict
        self.hooks: list[RemovableHandle] = []
        self.current: Pass | None = None
        self.abandoned: Pass | None = None  # failed here, and not yet completed with the others
        self.passes = 0
        self.passes_before_step = 0
        self.backwards = 0  # since the last optimizer step
        self.is_paused = False  # by no_sync
        self.has_unsent = False  # gradients that only this rank has
        self.is_tainted = False  # by a backward pass that failed since the last step
        self.adopt(named)

    # Parameters and buckets

    def adopt(self, named: Named) -> list[Slot]:
        """Watch parameters; those that need no gradient are looked at again later."""
        adopted: list[Slot] = []
        for name, parameter in named:
            if not parameter.requires_grad:
                self.frozen.append((name, parameter))
                continue
            slot = Slot(name, parameter, name in self.sparse_names)
            (self.sparse if slot.is_sparse else adopted).append(slot)
            self.hooks.append(parameter.register_post_accumulate_grad_hook(self.hook_of(slot)))  # type: ignore[no-untyped-call]
        self.slots += adopted
        return adopted

    def hook_of(self, slot: Slot) -> Callable[[nn.Parameter], None]:
        """What autograd calls when the gradient of a parameter has been accumulated."""
        return lambda _: self.gradient_came(slot)

    def planned(self) -> list[list[Slot]]:
        """The buckets as they are, or as they would be if gradients came in reverse order of registration."""
        if self.judged:
            return [list(bucket.slots) for bucket in self.buckets]
        return self.grouped(self.slots[::-1])

    def grouped(self, slots: Sequence[Slot]) -> list[list[Slot]]:
        """Slots by bucket."""
        items = [Item(slot.parameter.nbytes, (slot.parameter.dtype, slot.parameter.device)) for slot in slots]
        return [[slots[at] for at in members] for members in assign(items, self.first_bucket_bytes, self.bucket_bytes)]

    def make_buckets(self, order: Sequence[Slot]) -> None:
        """After the first pass: in the order in which gradients came on rank 0; those that did not come are last."""
        last = {slot: position for position, slot in enumerate(order)}
        number = {slot: position for position, slot in enumerate(self.slots)}
        for slot in last:
            slot.expected = slot.fired
        ranked = sorted(self.slots, key=lambda slot: (last.get(slot, len(order)), -number[slot]))
        agreed = torch.tensor([number[slot] for slot in ranked], device=self.fabric.device)
        self.fabric.broadcast(agreed)
        self.add_buckets([self.slots[position] for position in agreed.tolist()], has_verdict=True)

    def add_buckets(self, slots: Sequence[Slot], has_verdict: bool) -> None:
        """Make memory for gradients; the last bucket may carry the verdict."""
        groups = self.grouped(slots) or [[]]
        for group in groups:
            carries = has_verdict and group is groups[-1]
            self.buckets.append(Bucket(self.fabric, len(self.buckets), group, carries))
        if has_verdict:
            self.judged = self.buckets[-1]

    # During backward

    def gradient_came(self, slot: Slot) -> None:
        """A gradient has been accumulated in `parameter.grad`."""
        current = self.current
        if current is None or current.autograd_pass != current_pass():
            current = self.enter_pass()
        if not current.synchronizes:
            return
        slot.fired += 1
        if not self.judged:
            current.order.append(slot)
        elif slot.fired > slot.expected:
            self.came_again(slot, current)
        elif slot.fired == slot.expected and not slot.is_sparse:
            if not slot.is_small:
                slot.place()
            slot.bucket.missing -= 1
            if not slot.bucket.missing:
                self.send_full_buckets(current)

    def enter_pass(self) -> Pass:
        """The first gradient of a backward pass, or of one that is nested in it."""
        if self.current is None:
            self.backwards += 1
            self.current = self.begin(synchronizes=not self.is_paused and self.backwards % self.accumulate == 0)
        self.current.autograd_pass = current_pass()
        End(self.send_the_rest, self.finish_backward, self.backward_failed)
        return self.current

    def begin(self, synchronizes: bool, has_data: bool = True) -> Pass:
        """Get ready for the gradients of a pass."""
        self.complete_abandoned()
        if not synchronizes:
            self.has_unsent = True
            return Pass(synchronizes)
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
        for slot in chain(self.slots, self.sparse):
            slot.fired = 0
        self.passes += 1
        begun = Pass(synchronizes, has_data)
        self.tell(begun, computing=True)
        return begun

    def came_again(self, slot: Slot, current: Pass) -> None:
        """More gradients than in the first pass; too late if the bucket has left, because it would be torn."""
        if slot.is_sparse or slot.bucket.number >= current.next_bucket:
            slot.expected = slot.fired
            return
        raise LateGradient(
            f"{slot.name} received gradient {slot.fired} of this pass after its bucket had left; in the first pass "
            f"there were {slot.expected}. Its graph changes from step to step, and parts of it have backward passes of "
            f"their own: use checkpoint(..., use_reentrant=False), or wrap the backward pass in sync.no_sync()"
        )

    def send_full_buckets(self, current: Pass) -> None:
        """In the agreed order, as far as they are full."""
        while current.next_bucket < len(self.buckets):
            bucket = self.buckets[current.next_bucket]
            if bucket.missing or bucket is self.judged:  # the verdict is not known before the end of the pass
                return
            bucket.place_small()
            bucket.flags.fill_(1)
            self.send(bucket, current)

    def send(self, bucket: Bucket, current: Pass) -> None:
        """The next bucket leaves."""
        bucket.bad.zero_()
        if bucket is self.judged:
            bucket.verdict.zero_()
            bucket.verdict[0] = float(current.failed or self.is_tainted)
            bucket.verdict[1 + self.fabric.rank] = float(current.has_data)
        current.flights.append(self.pipeline.start(self.passes, bucket))
        current.next_bucket += 1
        self.tell(current, computing=True)

    def send_from(self, first: int, current: Pass) -> None:
        """All buckets from this one on, with zeros for gradients that did not come."""
        for bucket in self.buckets[first:]:
            if current.has_data and not current.failed:
                bucket.fill()
            else:
                bucket.flat.zero_()
            self.send(bucket, current)

    def tell(self, current: Pass, computing: bool) -> None:
        """Let the others see how far this rank is."""
        self.fabric.write_note((self.passes, current.next_bucket, len(self.buckets), int(computing)))

    # At the end of backward

    def send_the_rest(self) -> None:
        """Whatever has not left yet."""
        current = self.current
        if current is None or not current.synchronizes or not self.judged:
            return
        try:
            self.send_from(current.next_bucket, current)
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
        for slot in chain(self.slots, self.sparse):
            slot.parameter.grad = None
        if not current.synchronizes:
            self.is_tainted = True
        else:
            current.failed = True
            self.abandoned = current
            with suppress(SynclineError):
                if self.judged:
                    self.send_from(current.next_bucket, current)

    # Passes

    def synchronize(self, has_data: bool = True) -> Verdict:
        """A pass without a backward: average what gradients there are, or keep the others company without any."""
        current = self.begin(synchronizes=True, has_data=has_data)
        if self.judged:
            self.send_from(0, current)
        return self.complete(current)

    def complete_abandoned(self) -> None:
        """Finish with the others a pass that failed here."""
        current, self.abandoned = self.abandoned, None
        if current is not None:
            self.complete(current)

    def complete(self, current: Pass) -> Verdict:
        """Everything that ranks say to each other at the end of a pass."""
        if not self.judged:
            self.make_buckets_together(current)
        for flight in current.flights:
            self.wait(flight)
        self.adopt_unfrozen(current)
        verdict = self.read_verdict()
        for bucket in self.buckets:
            self.pipeline.settle(bucket, verdict.is_good)
        takes = current.has_data and not current.failed
        for slot in self.sparse:
            average_sparse(self.fabric, slot.parameter, takes)
        if takes:
            for bucket in self.buckets:
                bucket.hand_out()
            self.is_tainted = self.is_tainted or verdict.failed
        if current.has_data:
            self.has_unsent = False
        self.at_the_end(verdict)
        self.tell(current, computing=False)
        return verdict

    def make_buckets_together(self, current: Pass) -> None:
        """At the end of the first pass; ranks wait for each other here, and not in the first bucket."""
        waited_from_ns = monotonic_ns()
        with self.explaining(0):
            self.make_buckets(current.order)
        self.pipeline.recorder.waited(waited_from_ns, monotonic_ns())
        self.send_from(0, current)

    def wait(self, flight: Flight) -> None:
        """Wait for a bucket; if it never comes, say why."""
        with self.explaining(flight.number):
            self.pipeline.wait(flight)

    @contextmanager
    def explaining(self, bucket: int) -> Iterator[None]:
        """Add to the error about a peer what is known of it and of the bucket."""
        try:
            yield
        except PeerError as error:
            names = [[slot.name for slot in slots] for slots in self.planned()]
            raise explain(error, self.passes, bucket, names, self.fabric.note_of(error.rank)) from None

    def adopt_unfrozen(self, current: Pass) -> None:
        """Parameters that need a gradient since this pass get buckets of their own, and are averaged at once."""
        if not any(parameter.requires_grad for _, parameter in self.frozen):
            return
        frozen, self.frozen = self.frozen, []
        before = len(self.buckets)
        if slots := self.adopt(frozen):
            self.add_buckets(slots[::-1], has_verdict=False)
        self.send_from(before, current)
        for flight in current.flights[before:]:
            self.wait(flight)

    def read_verdict(self) -> Verdict:
        """The same on every rank."""
        assert self.judged is not None
        failed, *active = self.judged.verdict.tolist()
        bad = tuple(bucket.number for bucket in self.buckets if bucket.bad.item() > 0)
        return Verdict(failed > 0, bad, tuple(rank for rank, part in enumerate(active) if part > 0))

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self.buckets:
            bucket.values.mul_(factor)
        for slot in self.sparse:
            if slot.parameter.grad is not None:
                slot.parameter.grad.mul_(factor)

    # To be saved and restored

    def layout(self) -> dict[str, Any]:
        """The buckets by parameter names, and how many gradients each parameter receives in a pass."""
        names = [[slot.name for slot in bucket.slots] for bucket in self.buckets]
        expected = {slot.name: slot.expected for slot in self.slots}
        return {"buckets": names, "expected": expected, "passes": self.passes}

    def restore(self, saved: dict[str, Any]) -> None:
        """Make the buckets that there were, so that what follows has the same bits."""
        self.passes = self.passes_before_step = saved["passes"]
        if self.judged or not saved["buckets"]:
            return
        by_name = {slot.name: slot for slot in self.slots}
        if set(by_name) != {name for names in saved["buckets"] for name in names}:
            return  # other parameters need a gradient now: the next pass makes new buckets
        for name, times in saved["expected"].items():
            by_name[name].expected = times
        groups = [[by_name[name] for name in names] for names in saved["buckets"]]
        for group in groups:
            self.buckets.append(Bucket(self.fabric, len(self.buckets), group, group is groups[-1]))
        self.judged = self.buckets[-1]

    # Around the optimizer's step

    def before_step(self) -> None:
        """See that a step uses nothing but synchronized gradients, and that every rank has taken part in a pass."""
        self.complete_abandoned()
        if self.has_unsent or self.passes == self.passes_before_step:
            self.synchronize()

    def after_step(self) -> None:
        """The optimizer has made its step."""
        self.backwards = 0
        self.is_tainted = False
        self.passes_before_step = self.passes

    def close(self) -> None:
        """Stop watching."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.pipeline.close()
