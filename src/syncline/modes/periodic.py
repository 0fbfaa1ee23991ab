"""Modes in which ranks train alone for some steps and then meet.

Steps are counted by rounds of the optimizers, and with a GradScaler by its updates, because it may leave out a step on
one rank only. What a rank does between meetings is its own business: a gradient that is not finite skips its step
there, and a rank whose parameters are not finite contributes nothing and takes the mean of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from syncline.buckets.bucket import Slot
from syncline.codecs.none import NoCodec
from syncline.errors import ConfigError
from syncline.fabric.base import Fabric
from syncline.guards.finite import first_not_finite, is_finite
from syncline.modes.exchange import Exchange, Fragment
from syncline.modes.fragments import split
from syncline.modes.gradients import GradientDriver
from syncline.modes.mode import DivideBy, Driver
from syncline.modes.outer import Outer
from syncline.modes.period import OptimizerPolicy, Period
from syncline.modes.replica import Replica
from syncline.pipeline import Pipeline
from syncline.replicas import average_optimizers, broadcast_optimizers


class PeriodicDriver(Driver):
    """Trains alone and meets."""

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
        self.outer = outer
        self.warmup = warmup
        self.optimizer_policy = optimizer
        self.steps = 0
        self.meetings = 0
        self.length = period.every  # of the period that is running
        self.met_at = warmup  # the step of the last meeting
        self.is_alone = False  # has no data any more
        self.is_draining = False  # all meet in one place
        self.host: Fabric | None = None
        self.gradients = self.start_gradients(within_hosts)
        self.reducer = self.gradients.reducer if self.gradients is not None else None
        trained = [(name, p) for name, p in replica.named() if p.requires_grad]
        self.exchange = Exchange(replica, split(trained, period.fragments))
        self.anchors: dict[str, Tensor] = {}
        self.under_way: Fragment | None = None
        self.kept: dict[str, Any] | None = None  # a fragment that was under way when a checkpoint was made
        if not warmup:
            self.drop_anchors()
        if replica.scaler is not None:
            self.count_updates(replica.scaler)

    def start_gradients(self, within_hosts: bool) -> GradientDriver | None:
        """In the first steps gradients are averaged over all ranks, or always over those of a host."""
        replica = self.replica
        if within_hosts:
            mine = next(list(host) for host in replica.fabric.hosts if replica.fabric.rank in host)
            self.host = replica.fabric.subgroup(mine)
            settings = replace(replica.settings, codec=NoCodec())
            replica = replace(replica, fabric=self.host, settings=settings, collective="auto")
        elif not self.warmup:
            return None
        driver = GradientDriver(replica)
        driver.new_gradients = lambda: self.new_gradients()
        return driver

    def count_updates(self, scaler: torch.amp.GradScaler) -> None:
        """A step that the scaler leaves out counts as well: the other ranks have made theirs."""
        update = scaler.update

        def update_and_count(*arguments: Any, **named: Any) -> None:
            update(*arguments, **named)
            self.count()

        scaler.update = update_and_count  # type: ignore[method-assign]
        self.uncount = lambda: setattr(scaler, "update", update)

    # In the user's loop

    def before_round(self) -> str:
        if self.gradients is not None:
            return self.gradients.before_round()
        if self.replica.settings.nonfinite == "ignore":
            return ""
        bad = first_not_finite((name, p.grad) for name, p in self.replica.named() if p.grad is not None)
        return f"the gradient of {bad} is not finite on this rank" if bad else ""

    def after_step(self) -> None:
        if self.gradients is not None:
            self.gradients.after_step()

    def after_round(self, skipped: bool) -> None:
        if self.replica.scaler is None:
            self.count()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.gradients is None:
            yield
            return
        with self.gradients.no_sync():
            yield

    def wait(self) -> None:
        if self.gradients is not None:
            self.gradients.wait()

    def count(self) -> None:
        """A step is over."""
        self.steps += 1
        if self.steps < self.warmup:
            return
        if self.steps == self.warmup:
            self.end_warmup()
        else:
            self.meet_when_due()

    def end_warmup(self) -> None:
        """From here on ranks train alone."""
        if self.gradients is not None and self.host is None:
            self.gradients.close()
            self.gradients = self.reducer = None
        self.drop_anchors()

    @torch.no_grad()
    def drop_anchors(self) -> None:
        """Here all ranks are equal, and here they will be compared with."""
        if self.outer is None:
            return
        for fragment in self.exchange.fragments:
            for slot in fragment.slots:
                wide = torch.promote_types(slot.parameter.dtype, torch.float32)
                self.anchors[slot.name] = slot.parameter.detach().to(wide, copy=True)

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
            self.met_at = self.steps
            if self.meetings % self.period.fragments == 0:
                self.length = self.period.next(self.length)

    def next_fragment(self) -> Fragment:
        """Whose turn it is."""
        return self.exchange.fragments[self.meetings % self.period.fragments]

    @torch.no_grad()
    def leave(self) -> None:
        """Send off what this rank has to say about the next fragment."""
        fragment = self.next_fragment()
        contributes = not self.is_alone and all(is_finite(slot.parameter) for slot in fragment.slots)
        self.exchange.leave(fragment, self.fill, contributes)
        self.under_way = fragment

    def fill(self, slot: Slot) -> None:
        """What this rank contributes: where it is, or how far it has come."""
        if self.outer is None:
            slot.view.copy_(slot.parameter)
        else:
            torch.sub(self.anchors[slot.name], slot.parameter, out=slot.view)

    @torch.no_grad()
    def arrive(self) -> tuple[int, ...]:
        """Take in what all ranks have said; the ranks that had something to say."""
        active = self.take_kept() if self.kept is not None else self.take_arrived()
        self.meetings += 1
        if active:
            self.settle_optimizers()
            self.replica.settle_buffers(active[0])
            self.compare()
        return active

    def take_arrived(self) -> tuple[int, ...]:
        """From the buckets of the fragment that is under way."""
        fragment, self.under_way = self.under_way, None
        assert fragment is not None
        verdict = self.exchange.arrive(fragment)
        contributed = self.replica.fabric.rank in verdict.active
        if verdict.active:
            rates = self.replica.learning_rates()
            for slot in fragment.slots:
                self.move(slot, slot.view, rates.get(slot.name, 0.0), contributed)
        return verdict.active

    def take_kept(self) -> tuple[int, ...]:
        """From a checkpoint."""
        kept, self.kept = self.kept, None
        assert kept is not None
        rates = self.replica.learning_rates()
        for slot in self.next_fragment().slots:
            if slot.name in kept["means"]:
                self.move(slot, kept["means"][slot.name], rates.get(slot.name, 0.0), kept["contributed"])
        return tuple(kept["active"])

    def move(self, slot: Slot, mean: Tensor, rate: float, contributed: bool) -> None:
        """Put a parameter where the ranks have agreed, or between that and where it has gone since."""
        target = mean
        if self.outer is not None:
            target = self.anchors[slot.name]
            self.outer.step(slot.name, target, mean, rate)
        if self.period.merge and contributed and not self.is_draining:
            slot.parameter.lerp_(target.to(slot.parameter.dtype), 1 - self.period.merge)
        else:
            slot.parameter.copy_(target)

    def settle_optimizers(self) -> None:
        """Keep the states of optimizers, average them, or begin anew; of a rank that has NaN in them, the last."""
        if self.optimizer_policy == "average":
            average_optimizers(self.replica.fabric, self.replica.optimizers)
        broken = not all(is_finite(state) for _, state in self.replica.optimizer_state() if state.is_floating_point())
        if self.optimizer_policy == "reset" or broken:
            for optimizer in self.replica.optimizers:
                optimizer.state.clear()

    def compare(self) -> None:
        """Where all meet in one place and have been there, they have the same bits."""
        every = self.replica.settings.check_every
        alike = self.period.fragments == 1 and not self.period.merge
        if alike and every and self.meetings % every == 0:
            self.replica.compare(f"after meeting {self.meetings}", optimizers=False)

    def drain(self) -> None:
        """Meet now, with every fragment, wherever in its period it is; all ranks are equal after that."""
        if self.steps <= self.warmup:
            return
        self.is_draining = True
        for _ in range(self.period.fragments):
            if self.under_way is None and self.kept is None:
                self.leave()
            self.arrive()
        self.is_draining = False
        self.met_at = self.steps

    def keep_company(self, divide_by: DivideBy) -> None:
        if self.steps < self.warmup or self.period.fragments > 1 or self.period.delay:
            raise ConfigError("join() needs a mode without fragments or delay, after its warm-up; use sync.drain()")
        last = 0
        while True:
            self.leave()
            active = self.arrive()
            if not active:
                break
            last = active[0]
            self.is_alone = True
        self.is_alone = False
        broadcast_optimizers(self.replica.fabric, self.replica.optimizers, last)

    def pipelines(self) -> list[Pipeline]:
        return [*super().pipelines(), self.exchange.pipeline]

    # To be saved and restored

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {
            "steps": self.steps,
            "meetings": self.meetings,
            "rounds": self.exchange.rounds,
            "length": self.length,
            "met_at": self.met_at,
            "under_way": self.saved_fragment(),
            "codec_state": self.exchange.pipeline.state_dict(),
            "anchors": {name: anchor.clone() for name, anchor in self.anchors.items()},
            "momenta": {name: one.clone() for name, one in self.outer.momenta.items()} if self.outer else {},
            "parameters": {name: p.detach().clone() for name, p in self.replica.named()},
            "optimizers": [optimizer.state_dict() for optimizer in self.replica.optimizers],
        }
        if self.gradients is not None:
            saved["gradients"] = self.gradients.state_dict()
        return saved

    def saved_fragment(self) -> dict[str, Any] | None:
        """What is under way, waited for."""
        if self.under_way is None:
            return self.kept
        verdict = self.exchange.arrive(self.under_way)
        means = {slot.name: slot.view.clone() for slot in self.under_way.slots}
        contributed = self.replica.fabric.rank in verdict.active
        self.kept = {"active": list(verdict.active), "contributed": contributed, "means": means}
        self.under_way = None
        return self.kept

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.steps, self.meetings = saved["steps"], saved["meetings"]
        self.length, self.met_at, self.kept = saved["length"], saved["met_at"], saved["under_way"]
        self.exchange.rounds = saved["rounds"]
        self.exchange.pipeline.load_state_dict(saved["codec_state"])
        self.anchors = {name: anchor.clone() for name, anchor in saved["anchors"].items()}
        if self.outer is not None:
            self.outer.momenta = {name: one.clone() for name, one in saved["momenta"].items()}
        for name, parameter in self.replica.named():
            parameter.copy_(saved["parameters"][name])
        for optimizer, state in zip(self.replica.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if self.gradients is not None and self.steps >= self.warmup:
            self.end_warmup_as_saved()
        if self.gradients is not None and "gradients" in saved:
            self.gradients.load_state_dict(saved["gradients"])

    def end_warmup_as_saved(self) -> None:
        """The warm-up was over when the state was saved."""
        if self.host is None and self.gradients is not None:
            self.gradients.close()
            self.gradients = self.reducer = None

    uncount = staticmethod(lambda: None)

    def close(self) -> None:
        self.uncount()
        if self.gradients is not None:
            self.gradients.close()
        self.exchange.pipeline.close()
