"""Modes in which ranks train alone for some steps and then meet.

Steps are counted by rounds of the optimizers, and with a GradScaler by its updates, because it may leave out a step on
one rank only. What a rank does between meetings is its own business: a gradient that is not finite skips its step
there, and a rank whose parameters are not finite, or too large to be added up, contributes nothing and takes the mean
of the others, or where these have no data any more, what they have. A meeting of which nothing comes, because no rank
is sound or because a codec cannot go on from what it has kept, is skipped by all ranks: each keeps what it has, and too
many in a row are an error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from time import monotonic_ns
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.codecs.none import NoCodec
from syncline.core.status import Call
from syncline.errors import ConfigError
from syncline.fabric.base import Fabric
from syncline.guards.fingerprint import NO_FINGERPRINT, Fingerprint, digest_of
from syncline.guards.finite import Skipping, first_not_finite, has_finite_gradients, is_finite
from syncline.guards.hangs import some
from syncline.guards.hyperparameters import Hyperparameters
from syncline.guards.loads import Loads
from syncline.modes.anchors import Anchors
from syncline.modes.exchange import Exchange, Fragment, Heard
from syncline.modes.fragments import split
from syncline.modes.gradients import GradientDriver
from syncline.modes.mode import Driver
from syncline.modes.outer import Outer
from syncline.modes.period import OptimizerPolicy, Period
from syncline.modes.replica import Replica
from syncline.modes.settings import Settings
from syncline.path.bucket import Slot
from syncline.path.codec_state import Saved
from syncline.path.path import DivideBy, Path
from syncline.replicas import average_optimizers, broadcast_tensors, compare_layouts, optimizer_tensors

log = logging.getLogger(__name__)
MOST_STEPS_OF_A_ROUND = 10  # beyond the length of a period, until a loop is told that an optimizer does not step


class PeriodicDriver(Driver):
    """Trains alone and meets."""

    mends_parameters = True

    def __init__(
        self,
        replica: Replica,
        period: Period,
        outer: Outer | None,
        warmup: int = 0,
        within_hosts: bool = False,
        optimizer: OptimizerPolicy = "keep",
    ) -> None:
        """Without an `outer` parameters themselves are averaged, and no anchor is kept."""
        super().__init__(replica)
        self.period = period
        self.warmup = warmup
        self.optimizer_policy = optimizer
        self.steps = 0
        self.stepped: Counter[Optimizer] = Counter()  # since a round was last completed: all have stepped in it
        self.meetings = 0
        self.length = period.every  # of the period that is running
        self.met_at = warmup  # the step of the last meeting
        self.equal_at = warmup  # the step after which all ranks were last equal
        self.has_moved = False  # since then, by an optimizer of several
        self.is_alone = False  # has no data any more
        self.last_active = 0  # the lowest rank that others could take something from, at the last meeting of any
        self.is_draining = False  # all meet in one place
        self.skipping = Skipping(replica.settings.nonfinite, replica.settings.most_skips, "meeting")
        self.skipped = False  # the last meeting
        self.host = self.own_host() if within_hosts else None
        self.gradients: GradientDriver | None = None
        self.start_gradients()
        trained = [(name, p) for name, p in replica.named() if p.requires_grad]
        self.exchange = Exchange(replica, split(trained, period.fragments))
        self.anchors = Anchors(outer)
        self.hyperparameters = Hyperparameters(replica.optimizers)
        self.loads = Loads(replica.model, replica.named(), self.loaded)
        self.under_way: Fragment | None = None
        self.kept: Heard | None = None  # of a fragment that was under way when a checkpoint was made
        if not warmup:
            self.drop_anchors()

    def own_host(self) -> Fabric:
        """The ranks that average gradients in every step."""
        fabric = self.replica.fabric
        return fabric.subgroup(next(host for host in fabric.hosts if fabric.rank in host))

    def start_gradients(self) -> None:
        """In the warm-up gradients are averaged over all ranks, after it over those of a host, or not at all."""
        if self.gradients is not None:
            self.gradients.close()
        self.gradients = self.reducer = None
        replica = self.replica
        if self.steps >= self.warmup:
            if self.host is None:
                return
            settings = replace(replica.settings, codec=NoCodec())
            replica = replace(replica, fabric=self.host, settings=settings, collective="auto")
        self.gradients = GradientDriver(replica)
        self.gradients.new_gradients = lambda: self.new_gradients()
        self.reducer = self.gradients.reducer

    # In the user's loop

    def before_round(self) -> None:
        if self.gradients is not None:
            self.gradients.before_round()

    def before_step(self, optimizer: Optimizer) -> None:
        """Optimizers may take turns: what is wrong with the gradients of one says nothing of the others."""
        if self.gradients is not None:
            self.problem = self.gradients.problem
        else:
            ignored = self.replica.settings.nonfinite == "ignore"
            self.problem = "" if ignored or has_finite_gradients(optimizer) else self.what_is_not_finite()

    def warn_of_endless_round(self) -> None:
        """Say that the period does not go on, because steps are counted by rounds of all optimizers."""
        idle = [
            f"optimizer {number} ({type(optimizer).__name__})"
            for number, optimizer in enumerate(self.replica.optimizers, 1)
            if optimizer not in self.stepped
        ]
        if idle and self.replica.scaler is None:
            log.warning(
                "%s has not stepped while others of this Sync made %d steps, and ranks synchronize every %d steps of "
                "all optimizers: until then each trains alone. Make a Sync for each part of the model with its "
                "optimizer, or a Sync with that optimizer only when its phase begins",
                " and ".join(idle),
                max(self.stepped.values()),
                self.length,
            )

    def what_is_not_finite(self) -> str:
        """Which gradient of this rank is NaN or infinite; the first one, for all optimizers that step with any."""
        bad = first_not_finite((name, p.grad) for name, p in self.replica.named() if p.grad is not None)
        return f"the gradient of {bad} is not finite on this rank" if bad else ""

    def after_step(self, optimizer: Optimizer) -> None:
        self.has_moved = True
        self.stepped[optimizer] += 1
        if self.stepped[optimizer] == self.length + MOST_STEPS_OF_A_ROUND:
            self.warn_of_endless_round()
        if self.gradients is not None:
            self.gradients.after_step(optimizer)

    def after_scaler(self, optimizer: Optimizer) -> None:
        self.has_moved = True  # also where the scaler has left out the step on this rank only

    def after_round(self, skipped: bool) -> None:
        self.stepped.clear()
        if self.replica.scaler is None:
            self.count()

    def after_update(self) -> None:
        """A step that the scaler leaves out counts as well: the other ranks have made theirs."""
        self.count()

    def without_gradient(self) -> Iterable[Slot]:
        slots = [slot for fragment in self.exchange.fragments for slot in fragment.slots]
        return [slot for slot in slots if slot.parameter.grad is None]

    def needs_scaler(self) -> str:
        return "a step that it leaves out on one rank must count there, or ranks would wait for each other"

    def wait(self) -> None:
        if self.gradients is not None:
            self.gradients.wait()

    def count(self) -> None:
        """A step is over. One that all ranks skip together, in the warm-up, never happened."""
        if self.steps < self.warmup and self.gradients is not None and self.gradients.problem:
            return
        self.steps += 1
        self.loads.train()
        if self.steps < self.warmup:
            return
        if self.steps == self.warmup:
            self.end_warmup()
        else:
            self.meet_when_due()

    def end_warmup(self) -> None:
        """From here on ranks train alone."""
        self.start_gradients()
        self.drop_anchors()
        self.loads.clear()

    def drop_anchors(self) -> None:
        """From here on ranks go different ways."""
        for fragment in self.exchange.fragments:
            self.anchors.drop(fragment.slots)

    def loaded(self, names: Collection[str]) -> None:
        """Weights that were loaded are where ranks go on from, and not how far this one has come."""
        for fragment in self.exchange.fragments:
            self.anchors.drop(slot for slot in fragment.slots if slot.name in names)

    # Meeting

    def meet_when_due(self) -> None:
        """A fragment leaves `delay` steps before its turn is over, and is taken in when it is.

        Turns are counted from the last meeting, and fragments by meetings, which are the same on all ranks.
        """
        turn = self.length // self.period.fragments
        since = self.steps - self.met_at
        if since == turn - self.period.delay:
            self.leave()
        if since == turn:
            self.arrive()
            self.end_turn()

    def end_turn(self) -> None:
        """Count from here; when all fragments have had their turns, the next period begins."""
        self.met_at = self.steps
        if self.meetings % self.period.fragments == 0:
            self.length = self.period.next(self.length)
        if self.meets_in_one_place and not self.skipped:
            self.are_equal()

    def are_equal(self) -> None:
        """All ranks are equal after this step."""
        self.equal_at = self.steps
        self.has_moved = False

    @property
    def meets_in_one_place(self) -> bool:
        """Whether all ranks are equal after a meeting."""
        return self.period.fragments == 1 and not self.period.merge

    def next_fragment(self) -> Fragment:
        """Whose turn it is."""
        return self.exchange.fragments[self.meetings % self.period.fragments]

    @torch.no_grad()
    def leave(self) -> None:
        """Send off what this rank has to say about the next fragment."""
        self.refuse_others()
        fragment = self.next_fragment()
        call = Call.DRAIN if self.is_draining else Call.SYNCHRONIZE
        self.exchange.leave(fragment, self.anchors.fill, not self.is_alone, self.fingerprint(), call)
        self.under_way = fragment

    def fingerprint(self) -> Fingerprint:
        """What ranks that train alone must have in common: hyperparameters, and the weights that they have loaded."""
        loaded = self.loads.leave()
        if not self.replica.settings.divergence_guard:
            return NO_FINGERPRINT
        began_ns = monotonic_ns()
        digest = digest_of(self.exchange.rounds, self.hyperparameters.digest(), sorted(loaded.items()))
        self.replica.recorder.guard_ns += monotonic_ns() - began_ns
        return Fingerprint(digest=digest)

    def refuse_others(self) -> None:
        """A parameter that nobody averages would be another one on every rank."""
        known = {slot.name: slot.parameter for fragment in self.exchange.fragments for slot in fragment.slots}
        for name, parameter in self.replica.named():
            if parameter.requires_grad and known.get(name) is not parameter:
                raise ConfigError(
                    f"{name} needs a gradient now, but was frozen or another parameter when this Sync was made, so "
                    f"ranks would not average it; close() this Sync before unfreezing or replacing and make another"
                )

    @torch.no_grad()
    def arrive(self) -> bool:
        """Take in what all ranks have said; whether any of them still has data."""
        heard, self.kept = self.kept or self.hear(), None
        self.refuse_differing(heard)
        source = None if heard.is_silence else self.judge(heard)
        if source is not None:
            self.take(heard, source)
        self.meetings += 1
        if source is not None:
            self.settle_optimizers(is_left_out=not heard.contributed and not self.is_alone)
            self.replica.settle_buffers(source)
            self.compare()
        if self.gradients is not None:
            self.gradients.accept()
        return not heard.is_silence

    def refuse_differing(self, heard: Heard) -> None:
        """Ranks whose fingerprints differ find out why, before anything of this synchronization is used."""
        if not heard.differs:
            return
        self.loads.tell_again()
        if len(heard.active) == self.replica.fabric.world:
            when = f"synchronization {self.meetings + 1}"
            self.replica.compare_hyperparameters(f"in {when}", scale=False)
            self.loads.compare(self.replica.fabric, when)

    def judge(self, heard: Heard) -> int | None:
        """The first of the ranks that others can take something from; None if all skip the meeting."""
        sources = heard.active or self.exchange.sound_ranks()
        self.last_active = sources[0] if sources else self.last_active
        problem = self.what_is_wrong(heard, sources)
        self.skipped = self.skipping.judge(problem, self.harm_done() if problem else "")
        return None if self.skipped else self.last_active

    def hear(self) -> Heard:
        """Wait for the fragment that is under way."""
        fragment, self.under_way = self.under_way, None
        assert fragment is not None
        return self.exchange.hear(fragment)

    def what_is_wrong(self, heard: Heard, sources: Sequence[int]) -> str:
        """Why nothing comes of a meeting; empty if something does."""
        if heard.active and heard.bad:
            return f"one of {some(heard.bad)} is too large on some rank to be added up with what its codec has kept"
        return "" if sources else "no rank has parameters that are finite and can be added up"

    def take(self, heard: Heard, source: int) -> None:
        """Go where the ranks have agreed; if all that have data are astray, where one is that keeps them company."""
        slots = self.next_fragment().slots
        if not heard.active:
            broadcast_tensors(self.replica.fabric, [slot.parameter for slot in slots], source)
            return
        rates = self.replica.learning_rates()
        for slot in slots:
            if slot.name in self.loads.since:  # what left before does not concern it any more
                continue
            self.move(slot, heard.means[slot.name], rates.get(slot.name, 0.0), heard.contributed)

    def move(self, slot: Slot, mean: Tensor, rate: float, contributed: bool) -> None:
        """Put a parameter where the ranks have agreed, or between that and where it has gone since."""
        target = self.anchors.moved(slot.name, mean, rate)
        if self.period.merge and contributed and not self.is_draining:
            slot.parameter.lerp_(target.to(slot.parameter.dtype), 1 - self.period.merge)
        else:
            slot.parameter.copy_(target)

    def settle_optimizers(self, is_left_out: bool) -> None:
        """Keep the states of optimizers, average them, or begin anew: the last on a rank that went astray."""
        states = [state for _, _, state in optimizer_tensors(self.replica.optimizers) if state.is_floating_point()]
        is_astray = is_left_out or not all(map(is_finite, states))
        if self.optimizer_policy == "reset" or is_astray:
            for optimizer in self.replica.optimizers:
                optimizer.state.clear()
        if self.optimizer_policy == "average":
            average_optimizers(self.replica.fabric, self.replica.optimizers)

    def compare(self) -> None:
        """Where all meet in one place and have been there, they have the same bits."""
        every = self.replica.settings.check_every
        if self.meets_in_one_place and every and self.meetings % every == 0:
            self.replica.compare(f"after meeting {self.meetings}", optimizers=False)

    def drain(self) -> None:
        """Meet now, with every fragment, wherever in its period it is; all ranks are equal after that."""
        if self.steps >= self.warmup and (self.steps != self.equal_at or self.has_moved):
            self.synchronize_all()

    def synchronize_all(self) -> None:
        """Synchronize every fragment now."""
        self.is_draining = True
        is_equal = True
        try:
            for _ in range(self.period.fragments):
                if self.under_way is None and self.kept is None:
                    self.leave()
                self.arrive()
                is_equal = is_equal and not self.skipped
        finally:
            self.is_draining = False
        self.met_at = self.steps
        if is_equal:
            self.are_equal()

    def join(self, divide_by: DivideBy | None) -> None:
        """Means are over the ranks that have something to say, whatever is asked for."""
        if divide_by is None:
            return
        if self.steps < self.warmup or self.period.fragments > 1 or self.period.delay or self.host is not None:
            raise ConfigError(
                "join() needs a mode without fragments, delay and within_hosts, after its warm-up; give all ranks "
                "equally many batches, or use mode=sync"
            )

    def keep_company(self) -> None:
        """Meet whenever the others do, the first time with what was learned since the last meeting."""
        self.is_alone = self.steps == self.met_at
        is_over = False
        while not is_over:
            self.leave()
            is_over = not self.arrive()
            self.end_turn()
            self.is_alone = True
        self.is_alone = False
        self.end_as_one()

    def end_as_one(self) -> None:
        """Take the state of a rank that trained to the last, or of another that is sound; if none is, stay apart."""
        sound = self.exchange.sound_ranks()
        if not sound:
            return
        self.replica.take_state_of(self.last_active if self.last_active in sound else sound[0])
        self.skipped = False
        self.are_equal()

    def paths(self) -> list[Path]:
        return [*super().paths(), self.exchange.path]

    # To be reconfigured

    def announce(self, wanted: Settings) -> None:
        if self.gradients is not None and self.steps < self.warmup:
            self.gradients.announce(wanted)
            return
        self.saved_fragment()
        self.exchange.announce(self.next_fragment(), Call.RECONFIGURE)
        compare_layouts(self.replica.fabric, [f"settings {wanted}"])

    def quiesce(self, wanted: Settings) -> None:
        if self.gradients is not None and self.steps < self.warmup:
            self.gradients.quiesce(wanted)
            return
        if self.replica.settings.codec.feedback and not wanted.codec.feedback:
            self.exchange.send_densely(self.replica)
            self.synchronize_all()
        else:
            self.drain()
        if self.equal_at != self.steps:
            raise ConfigError(
                "reconfigure() needs replicas that are equal, and the synchronization before it was skipped by all "
                "ranks, because no rank has finite parameters; go on from the last checkpoint"
            )

    def residuals(self) -> Saved:
        if self.gradients is not None and self.steps < self.warmup:
            return self.gradients.residuals()
        return self.exchange.path.state_dict()

    def take_over(self, residuals: Saved, previous: Driver) -> None:
        gradients = previous
        if isinstance(previous, PeriodicDriver):
            self.go_on(previous)
            gradients = previous.gradients or previous
        if self.gradients is not None:
            self.gradients.take_over(residuals if self.steps < self.warmup else {}, gradients)
        if self.steps < self.warmup:
            return
        if self.replica.settings.codec.feedback:
            self.exchange.path.load_state_dict(residuals)
        else:
            self.replica.apply_residuals(residuals)
        self.drop_anchors()

    def go_on(self, previous: PeriodicDriver) -> None:
        """Go on with the period of another driver where it is of the same mode, or with its momenta if it is alike."""
        mode, other = self.replica.settings.mode, previous.replica.settings.mode
        if type(mode) is type(other) and self.anchors.outer is not None and previous.anchors.outer is not None:
            self.anchors.outer.momenta = previous.anchors.outer.momenta
        self.exchange.rounds = previous.exchange.rounds
        self.exchange.path.good_passes = previous.exchange.path.good_passes
        if mode == other:
            self.steps, self.meetings, self.length = previous.steps, previous.meetings, previous.length
            self.met_at, self.equal_at, self.has_moved = previous.met_at, previous.equal_at, previous.has_moved
            self.start_gradients()

    # To be saved and restored

    def state_dict(self) -> dict[str, Any]:
        under_way = self.saved_fragment()  # which counts as a good pass from here on, and whose residuals are committed
        saved: dict[str, Any] = {
            "steps": self.steps,
            "meetings": self.meetings,
            "rounds": self.exchange.rounds,
            "good_passes": self.exchange.path.good_passes,
            "length": self.length,
            "met_at": self.met_at,
            "equal_at": self.equal_at,
            "has_moved": self.has_moved,
            "under_way": under_way,
            "codec_state": self.exchange.path.state_dict(),
            **self.anchors.state_dict(),
            "parameters": {name: p.detach().clone() for name, p in self.replica.named()},
            "buffers": {name: buffer.clone() for name, buffer in self.replica.model.named_buffers()},
            "optimizers": deepcopy([optimizer.state_dict() for optimizer in self.replica.optimizers]),
        }
        if self.gradients is not None:
            saved["gradients"] = self.gradients.state_dict()
        return saved

    def saved_fragment(self) -> dict[str, Any] | None:
        """What is under way, waited for."""
        if self.under_way is not None:
            self.kept = self.hear().copied()
        return asdict(self.kept) if self.kept is not None else None

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.steps, self.meetings = saved["steps"], saved["meetings"]
        self.length, self.met_at, self.equal_at = saved["length"], saved["met_at"], saved["equal_at"]
        self.has_moved = saved["has_moved"]
        self.kept = Heard(**saved["under_way"]) if saved["under_way"] is not None else None
        self.under_way = None
        self.exchange.rounds = saved["rounds"]
        self.exchange.path.good_passes = saved["good_passes"]
        self.exchange.path.load_state_dict(saved["codec_state"])
        self.anchors.load_state_dict(saved)
        for name, parameter in self.replica.named():
            parameter.copy_(saved["parameters"][name])
        for name, buffer in self.replica.model.named_buffers():
            buffer.copy_(saved["buffers"][name])
        for optimizer, state in zip(self.replica.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(deepcopy(state))
        self.loads.restore()
        self.start_gradients()
        if self.gradients is not None:
            self.gradients.load_state_dict(saved["gradients"])

    def close(self) -> None:
        self.loads.close()
        if self.gradients is not None:
            self.gradients.close()
        self.exchange.path.close()
        if self.host is not None:
            self.host.close()
