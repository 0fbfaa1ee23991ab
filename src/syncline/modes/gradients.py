"""Modes in which gradients travel: every rank steps with the mean over ranks, of this pass or of the one before."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from syncline.codecs.none import NoCodec
from syncline.core.status import Call, PassStatus
from syncline.errors import ConfigError, Desync, FabricError, PairingError
from syncline.guards.fingerprint import NO_FINGERPRINT, Fingerprint
from syncline.guards.finite import first_not_finite, is_finite
from syncline.modes.forward_hook import ForwardHook
from syncline.modes.mode import Driver
from syncline.modes.replica import Replica
from syncline.modes.settings import Settings
from syncline.path.codec_state import Saved
from syncline.path.path import DivideBy
from syncline.reducer.parameters import sparse_names
from syncline.reducer.passes import Pass
from syncline.reducer.reducer import Reducer, ReducerConfig, State
from syncline.replicas import all_have, average_optimizers, broadcast_scaler, compare_layouts

log = logging.getLogger(__name__)


class GradientDriver(Driver):
    """Averages gradients in every pass."""

    reducer: Reducer

    def __init__(self, replica: Replica, lags_after: int | None = None) -> None:
        super().__init__(replica)
        settings = replica.settings
        self.lags = lags_after is not None
        self.joined: DivideBy | None = None  # inside `join`, where ranks may have different numbers of batches
        self.last_active = 0  # the lowest rank that took part with data in the last pass of any
        self.everyone_active = True
        self.is_draining = False
        self.passes_to_settle: int | None = None  # until ranks settle their scales, after one of them has failed
        self.late_versions: list[tuple[int, int]] | None = None  # of gradients that some ranks get only in their step
        self.handed_out: list[tuple[int, int]] = []  # versions of gradients when backward had ended
        self.has_problem_at_hand = False  # some late mean that was handed out last has one
        self.changes_gradients = False  # the loop does, between backward and step, as one that clips
        self.guard = replica.guard()
        self.doubted_from: int | None = None  # the pass from which on all ranks doubt that replicas are equal
        sparse = sparse_names(replica.model)
        if self.lags and sparse:
            raise PairingError(f"{min(sparse)} has sparse gradients, which mode=delayed cannot delay; use mode=sync")
        corrects = settings.codec.correction is not None
        if self.lags:
            refuse_shared(replica)
        is_scaled = replica.scaler is not None and replica.scaler.is_enabled()
        config = ReducerConfig(settings.plan(), settings.accumulate, lags_after, corrects=corrects, is_scaled=is_scaled)
        # What is in flight while ranks compare themselves or settle their buffers needs an order of its own.
        fabric = replica.fabric.subgroup() if self.lags else replica.fabric
        self.reducer = Reducer(
            fabric, replica.path(fabric), replica.named(), sparse, config, self, control=replica.fabric
        )
        self.hook = ForwardHook(replica.model, self.before_forward) if self.lags else None

    # In the user's loop

    def before_round(self) -> None:
        if not self.is_draining:
            self.complete_pass()
            self.refuse_changes()
            self.note_changes()
        if self.guard is not None:
            self.guard.begin_step()

    def complete_pass(self, late: bool = True) -> None:
        """See that gradients at hand are means over ranks."""
        has_failed = self.reducer.abandoned is not None
        self.refuse_stepping_again()
        self.reducer.before_step(late)
        if has_failed and self.reducer.in_flight is not None:
            self.hand_out()
            self.handed_out = self.reducer.versions()

    def refuse_stepping_again(self) -> None:
        """With a lag, a step without a backward pass of its own would send used gradients to all ranks once more."""
        used = set(self.reducer.used_at_hand())
        optimizers = self.replica.optimizers if used else []
        own = [slot for optimizer in optimizers for slot in self.reducer.layout.slots_of(optimizer)]
        if again := [slot.name for slot in own if slot in used]:
            raise ConfigError(
                f"a step came without a backward pass since the last one, and the gradients of {again[0]} were used by "
                f"that; with mode=delayed every step needs a backward pass, or zero_grad() where a rank has no batch "
                f"for it. Use mode=sync to step twice with the same gradients"
            )

    def before_step(self, optimizer: Optimizer) -> None:
        if self.reducer.in_flight is None and not self.is_draining:
            return  # the gradients at hand are those of the last pass
        late = self.reducer.late_means_of(optimizer)
        self.withholds = late is None
        self.problem = late.problem if late is not None else ""
        if not self.problem and self.has_problem_at_hand:
            self.problem = self.what_is_not_finite_of(optimizer)
        self.spoils_all = self.is_spoilt(late is not None and late.is_void)

    def what_is_not_finite_of(self, optimizer: Optimizer) -> str:
        """Which gradient of an optimizer is NaN by now, as where all were clipped together and another one was."""
        if self.replica.settings.nonfinite == "ignore":
            return ""
        slots = self.reducer.layout.slots_of(optimizer)
        bad = first_not_finite((slot.name, slot.parameter.grad) for slot in slots if slot.parameter.grad is not None)
        return f"the gradient of {bad} is not finite" if bad else ""

    def after_step(self, optimizer: Optimizer) -> None:
        super().after_step(optimizer)
        if self.guard is not None:
            self.guard.end_step()

    def after_scaler(self, optimizer: Optimizer) -> None:
        self.reducer.use(optimizer)

    def refuse_changes(self) -> None:
        """Gradients that this rank clipped were handed to another one as they had been, in its step."""
        if self.late_versions is None or self.late_versions == self.reducer.versions():
            return
        raise Desync(
            "some ranks had no synchronized gradients before this step, and those of this rank were changed since "
            "backward (clipped?), so ranks would make different steps; call sync.wait() before that, on all ranks"
        )

    def note_changes(self) -> None:
        """Whether the loop changes gradients at hand. A rank that applied the last ones alone would not do so."""
        if self.lags and not self.changes_gradients:
            self.changes_gradients = self.reducer.versions() != self.handed_out

    def unscaled(self) -> None:
        """A GradScaler has divided the gradients at hand, which is no change: drain() has them unscaled as well."""
        if self.lags and not self.changes_gradients:
            self.handed_out = self.reducer.versions()

    def after_round(self, skipped: bool) -> None:
        if self.lags and not self.is_draining:  # which is not done by all ranks at once
            self.compare(f"after step {self.reducer.passes}")

    def wait(self) -> None:
        self.complete_pass(late=False)

    def needs_scaler(self) -> str:
        if self.lags:
            return "the gradients of the step before have the scale of the step before"
        if self.replica.settings.codec.feedback or self.replica.settings.codec.correction is not None:
            return f"the residual of {self.replica.settings.codec.name} follows its scale"
        if self.passes_to_settle is not None:
            return "a rank that failed in its backward pass has not updated its scale as the others have"
        return ""

    def before_forward(self) -> None:
        """Nobody evaluates without the last gradients, and the others do not wait for a rank whose pass failed.

        Between backward and step there are gradients at hand, which are the loop's. Where it clips, the last ones wait
        for its next step: only there are they what all ranks make of them.
        """
        if self.replica.model.training or self.changes_gradients or self.reducer.state is State.AT_HAND:
            self.reducer.complete_abandoned()
        elif not self.waits_for_scaler():
            self.drain()

    def waits_for_scaler(self) -> bool:
        """Whether there are late means whose overflow a GradScaler is yet to see, on all ranks in the same step."""
        if self.replica.scaler is None or not self.replica.scaler.is_enabled():
            return False
        self.reducer.complete_abandoned()
        self.reducer.arrive_wanted()
        return any(late.problem for late in self.reducer.late)

    def drain(self) -> None:
        if self.is_draining:
            return
        self.is_draining = True
        try:
            with torch.inference_mode(False), self.reducer.between_steps():  # gradients are none of an evaluation
                self.drain_passes()
        finally:
            self.is_draining = False

    def drain_passes(self) -> None:
        """Step with all late means. A pass in flight that no optimizer stepped after is waited for, and stays."""
        self.reducer.complete_abandoned()
        self.reducer.note_changes()
        self.reducer.arrive_wanted()
        if self.reducer.late:
            self.refuse_unclipped()
            self.hand_out()
            self.replica.step_optimizers()
            self.reducer.drop_gradients()
            self.handed_out = self.reducer.versions()

    def refuse_unclipped(self) -> None:
        """Others may have clipped, in their step, what this rank has not stepped with because its own pass failed."""
        if self.changes_gradients and self.reducer.is_behind:
            raise ConfigError(
                "a backward pass failed on this rank since its last step, and others have stepped since with gradients "
                "that the loop changes (clips?), which drain() would use here as they came; make a step on all ranks "
                "before drain()"
            )

    def finish(self) -> None:
        if self.lags:
            at_hand = self.reducer.slots_at_hand()
            try:
                self.drain()
                self.reducer.hand_over(at_hand)
            except (FabricError, ConfigError) as error:
                log.warning("the last gradients were not applied: %s", error)

    def join(self, divide_by: DivideBy | None) -> None:
        self.joined = self.reducer.path.joined = divide_by

    def keep_company(self) -> None:
        self.drain()
        while self.still_active():
            pass
        self.reducer.counter.begin()
        self.replica.take_state_of(self.last_active)
        self.accept()

    def accept(self) -> None:
        """Take this replica for equal to the others, because all ranks have just been made so."""
        self.doubted_from = None
        if self.guard is not None:
            self.guard.accept()

    def still_active(self) -> bool:
        """Take part in one pass without data; whether anybody had some."""
        if self.reducer.synchronize(has_data=False) is None:
            self.reducer.arrive_late()
            self.reducer.drop_gradients()
        return self.any_active

    # What ranks say to each other

    def fingerprint(self, number: int) -> Fingerprint:
        """The fingerprint of this replica in a pass."""
        return self.guard.fingerprint(number) if self.guard is not None else NO_FINGERPRINT

    def pass_ended(self, status: PassStatus) -> str:
        """Means have come; why they cannot be used, or nothing."""
        self.withholds = False
        self.any_active = bool(status.active)
        self.last_active = status.active[0] if status.active else self.last_active
        self.everyone_active = len(status.active) == self.reducer.fabric.world
        self.doubt(status)
        if self.joined == "active" and status.active and not self.everyone_active:
            self.reducer.layout.scale(self.reducer.fabric.world / len(status.active))
        self.new_gradients()
        self.problem = self.what_is_wrong(status)
        if status.failed:
            self.passes_to_settle = 1
        self.late_versions = self.reducer.versions() if status.late and not self.lags else None
        return self.problem

    def doubt(self, status: PassStatus) -> None:
        """Doubt that replicas are equal, if the pass gives reason to; all ranks do so together."""
        is_comparable = self.everyone_active and not status.failed
        if is_comparable and (status.touched or status.differs):
            self.doubted_from = self.reducer.known_from
        elif status.touched and self.guard is not None:
            self.guard.tell_again()

    def also_synchronize(self) -> None:
        """All that ranks say to each other besides gradients; every rank comes by here in every pass."""
        if self.replica.scaler is not None:
            self.settle_scale(self.replica.scaler)
        if isinstance(self.reducer.in_flight, Pass):
            self.reducer.in_flight.loss_scale = self.loss_scale
            if self.reducer.in_flight.takes_part:
                self.hand_out()
        if self.lags:
            self.handed_out = self.reducer.versions()
        self.replica.settle_buffers(self.last_active)
        if not self.lags:
            self.compare(f"before step {self.reducer.passes}")
        elif self.has_doubts and self.can_compare:
            self.replica.compare_hyperparameters(f"before step {self.reducer.passes}")

    def settle_scale(self, scaler: GradScaler) -> None:
        """Have one scale again, in the pass after one that failed on a rank, which then had nothing to step with.

        Others have updated their scales since. Where that changed one, what comes of this pass is of different scales.
        """
        if self.passes_to_settle is None or self.lags:
            return
        if self.passes_to_settle:
            self.passes_to_settle -= 1
            return
        self.passes_to_settle = None
        if not all_have(self.replica.fabric, repr(scaler.get_scale())):
            self.problem = "ranks had different scales of the loss, because one had failed before"
            self.spoils_all = True
        broadcast_scaler(self.replica.fabric, scaler, self.last_active)

    @property
    def loss_scale(self) -> float:
        """The scale of the loss in gradients that the next step uses."""
        return 1.0 if self.is_draining or self.replica.scaler is None else self.replica.scaler.get_scale()

    def hand_out(self) -> None:
        """Give parameters their late means.

        Zeros are shown to what looks at gradients, as a GradScaler does, before a step that is not to be made.
        """
        self.forget_unwanted()
        self.reducer.hand_out(self.loss_scale)
        self.has_problem_at_hand = any(late.problem for late in self.reducer.late)
        for optimizer in self.replica.optimizers:
            if self.reducer.late_means_of(optimizer) is None:
                self.reducer.give_zeros(optimizer)

    def forget_unwanted(self) -> None:
        """Forget late means that no step has used in many passes.

        A loop that leaves out steps because of what it sees in them would leave out every step from here on.
        """
        reducer, most = self.reducer, self.replica.settings.most_skips
        newest = reducer.passes - most
        for late in [late for late in reducer.late if max(late.number, reducer.passes_before_step) < newest]:
            log.warning(
                "no optimizer has stepped in %d backward passes, so the gradients of pass %d are not used; with "
                "mode=delayed they are at hand until a step is made, also where a loop leaves it out because of them",
                most,
                late.number,
            )
            reducer.late.remove(late)

    @property
    def has_doubts(self) -> bool:
        """Whether all ranks know by now that replicas may differ."""
        return self.doubted_from is not None and self.reducer.passes >= self.doubted_from

    @property
    def can_compare(self) -> bool:
        """Whether all ranks should be equal here.

        With a lag a rank that is done has used the last gradients before the others do, who may clip them.
        """
        return self.everyone_active and not (self.lags and self.joined)

    def compare(self, when: str) -> None:
        """Compare replicas, if it is time to or there are doubts, which stay until replicas are found equal."""
        every = self.replica.settings.check_every
        is_time = every and self.reducer.passes % every == 0
        if self.can_compare and (is_time or self.has_doubts):
            self.replica.compare(when, touched=self.guard is not None and self.guard.has_touched)
            self.doubted_from = None
            if self.guard is not None:
                self.guard.found_equal()

    def what_is_wrong(self, status: PassStatus) -> str:
        """With the gradients at hand; empty if nothing is. Without a codec every mean is right or not by itself."""
        self.spoils_all = self.is_spoilt(status.failed)
        if status.failed:
            return "a rank failed in its backward pass"
        if status.nonfinite:
            buckets = self.reducer.layout.buckets[status.nonfinite[0] :]  # a pass that was saved may have had others
            names = ", ".join([slot.name for bucket in buckets[:1] for slot in bucket.slots][:3]) or "the parameters"
            return f"the gradient of one of {names} is not finite on some rank, or too large to be added up"
        return self.what_is_not_finite()

    def is_spoilt(self, is_void: bool) -> bool:
        """Whether what is wrong with some gradients is so with all that came with them."""
        return is_void or not isinstance(self.replica.settings.codec, NoCodec)

    def what_is_not_finite(self) -> str:
        """Which gradients are NaN or infinite; empty if none is."""
        if self.replica.settings.nonfinite == "ignore":
            return ""
        for bucket in self.reducer.layout.buckets:
            if not (bucket.buffer.finite or is_finite(bucket.buffer.values)):
                bad = [slot.name for slot in bucket.slots if not is_finite(slot.view)]
                return f"the gradient of {bad[0] if bad else 'a parameter'} is not finite"
        for slot in self.reducer.layout.sparse:
            gradient = slot.parameter.grad
            if gradient is not None and first_not_finite([(slot.name, gradient)]):
                return f"the gradient of {slot.name} is not finite"
        return ""

    # To be reconfigured, saved and restored

    def announce(self, wanted: Settings) -> None:
        self.reducer.refuse_unused_gradients("reconfigure()")
        self.reducer.refuse_frozen()
        self.reducer.announce(Call.RECONFIGURE)
        compare_layouts(self.replica.fabric, [f"settings {wanted}"])

    def quiesce(self, wanted: Settings) -> None:
        self.drain()
        self.reducer.in_flight = None  # it has arrived, and no optimizer stepped after it

    def residuals(self) -> Saved:
        return self.reducer.path.state_dict()

    def take_over(self, residuals: Saved, previous: Driver) -> None:
        if isinstance(previous, GradientDriver):
            self.reducer.restore(previous.reducer.state_dict())
            self.changes_gradients = previous.changes_gradients
            if self.replica.settings.mode != previous.replica.settings.mode:
                self.reducer.begin_warmup()
        else:
            average_optimizers(self.replica.fabric, self.replica.optimizers)
        self.load_codec_state(residuals)

    def load_codec_state(self, saved: Saved) -> None:
        """Go on with residuals and codec state; residuals that the codec has no place for are sent densely first."""
        if saved.get("residual") and not self.replica.settings.codec.feedback:
            self.reducer.path = self.replica.flushing(self.reducer.path)
        self.reducer.path.load_state_dict(saved)

    def state_dict(self) -> dict[str, Any]:
        return {
            "layout": self.reducer.state_dict(),
            "codec_state": self.reducer.path.state_dict(),
            "changes_gradients": self.changes_gradients,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.reducer.restore(saved["layout"])
        self.load_codec_state(saved["codec_state"])
        self.changes_gradients = saved["changes_gradients"]

    def close(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        if self.guard is not None:
            self.guard.close()
        self.reducer.close()
        if self.lags:
            self.reducer.fabric.close()


def refuse_shared(replica: Replica) -> None:
    """Refuse a parameter that several optimizers step with: a late gradient is for one step, of one of them."""
    seen: dict[Tensor, int] = {}
    for number, optimizer in enumerate(replica.optimizers, 1):
        for parameter in {p for group in optimizer.param_groups for p in group["params"]}:
            if (other := seen.setdefault(parameter, number)) != number:
                raise PairingError(
                    f"{replica.names.get(parameter, 'a parameter')} is in optimizers {other} and {number}, and with "
                    f"mode=delayed a gradient is used by one step only; give it to one of them, or use mode=sync"
                )
