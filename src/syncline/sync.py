"""`Sync`: the one line that keeps replicas in step.

    sync = syncline.Sync(model, optimizer)

It stands between `backward()` and `optimizer.step()`, through hooks of both, and holds no algorithm: when replicas talk
(`modes/`), what travels together (`reducer/`), its path (`path/`), what keeps a run safe (`guards/`) and what it
cost (`tracing/`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic_ns
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.batch_norm import refuse_shared_statistics
from syncline.codecs.codec import Codec
from syncline.codecs.registry import codec_of, text_of_codec
from syncline.collectives.registry import algorithm
from syncline.core.state import STATE_VERSION, choose_state, holds_work
from syncline.current import refuse_outlived
from syncline.errors import ConfigError, UnknownName
from syncline.fabric.base import Fabric
from syncline.guards.claims import Claim
from syncline.guards.finite import Policy, Skipping, has_finite_gradients
from syncline.modes.mode import Driver, Mode
from syncline.modes.registry import mode_of, text_of_mode
from syncline.modes.replica import Replica
from syncline.modes.settings import Buffers, Settings
from syncline.modes.staleness import Staleness
from syncline.path.path import DivideBy
from syncline.reducer.membership import Membership
from syncline.reducer.parameters import check_parameters, parameters_of
from syncline.reducer.reducer import Reducer
from syncline.replica.grad_scalers import ScalerListener, stepping_scaler, watch_scaler
from syncline.replica.optimizer_steps import Step, StepListener, watch_steps
from syncline.replicas import broadcast_tensors, compare_layouts, model_tensors
from syncline.tracing.quality import Quality
from syncline.tracing.spans import Recorder
from syncline.tracing.totals import Totals, mean_totals
from syncline.units import MIB

log = logging.getLogger(__name__)
DIVISORS: tuple[DivideBy, ...] = ("world", "active")


class Sync:
    """Keeps the replicas of a model in step.

    Every rank builds the same model and optimizer, and then this. Parameters and buffers are those of rank 0 from here
    on; with `mode="sync"` gradients are means over ranks when `backward()` returns, so that clipping sees what the
    optimizer will use. Settings are those of `modes.settings.Settings`, objects or their names; `fabric` is one from
    `run` or `init`, or `"auto"` for the current one.
    """

    least_world: ClassVar[int] = 0  # ranks from which on there is anything to do, if not what settings say

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        fabric: Fabric | str = "auto",
        mode: str | Mode = "sync",
        codec: str | Codec = "none",
        collective: str = "auto",
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
        accumulate: int = 1,
        buffers: Buffers = "broadcast",
        nonfinite: Policy = "skip",
        most_skips: int = 10,
        check_every: int = 0,
        seed: int = 0,
        lean: bool = False,
        divergence_guard: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        check_collective(collective)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{type(model).__name__} is not a torch.nn.Module; put several models in an nn.ModuleList"
            )
        self.model = model
        self.optimizers = list_optimizers(optimizer)
        self.scaler = scaler  # what is kept follows its scale, and it judges each optimizer by itself
        self.settings = Settings(
            mode=mode_of(mode),
            codec=codec_of(codec),
            collective=collective,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            accumulate=accumulate,
            buffers=buffers,
            nonfinite=nonfinite,
            most_skips=most_skips,
            check_every=check_every,
            seed=seed,
            lean=lean,
            divergence_guard=divergence_guard,
        )
        self.recorder = Recorder()
        self.skipping = Skipping(self.settings.nonfinite, self.settings.most_skips)
        self.membership = Membership(model)
        self.stepped: set[Optimizer] = set()  # with the gradients at hand
        self.judged: dict[
            str, bool
        ] = {}  # problems that gradients at hand have, and whether steps are skipped for them
        self.skips = False  # the step with these gradients
        named = parameters_of(model)
        if not any(parameter.requires_grad for _, parameter in named):
            raise ConfigError("no parameter of the model needs a gradient, so there is nothing to synchronize")
        self._given = find_fabric(fabric)
        check_parameters(model, named, self._given.device)
        self.fabric: Fabric | None = None
        self._driver: Driver | None = None
        self._claim = Claim()
        if self._given.world >= (self.least_world or self.settings.least_world):
            self._begin()
        steps = StepListener(self._before_step, self._after_step)
        self._endings = [watch_steps(optimizer, steps) for optimizer in self.optimizers]
        if scaler is not None:
            heard = ScalerListener(
                self._before_unscale, self._after_unscale, self._after_scaler_step, self._after_update
            )
            self._endings.append(watch_scaler(scaler, heard))
        self.recorder.begin(monotonic_ns())

    def _begin(self) -> Driver:
        """Let the mode begin, with all that it changes in the model."""
        with self._claim.of(parameters_of(self.model)):
            self._driver = self._join_others(self._given)
        self._driver.new_gradients = self.stepped.clear
        return self._driver

    def _join_others(self, given: Fabric) -> Driver:
        """Compare with the other ranks, start from the state of rank 0, and let the mode begin."""
        if given.incarnation and not self.settings.mode.has_servers:
            raise ConfigError(
                f"rank {given.rank} came later, in the place of a process that died; mode {self.settings.mode.name} "
                f"needs all ranks from the start: use async or bounded, or start again from the last checkpoint"
            )
        replica = self._replica(self.settings)
        if not given.incarnation:
            compare_layouts(replica.fabric, replica.common())
            broadcast_tensors(replica.fabric, model_tensors(self.model))
        self.fabric = replica.fabric
        return self.settings.mode.start(replica)

    def _replica(self, settings: Settings) -> Replica:
        """What a mode works on, over a fabric that can do what the settings ask for."""
        parent = self._given.with_engine() if settings.collective == "engine" else self._given
        fabric = self.fabric if self.fabric is not None and self.fabric.name == parent.name else parent.subgroup()
        collective = settings.collective
        if collective == "auto" and parent.has_engine:
            collective = "engine"  # NCCL and Gloo do it without Python in between
        return Replica(self.model, self.optimizers, self.scaler, settings, fabric, collective, self.recorder)

    @property
    def driver(self) -> Driver | None:
        """The mode at work on this rank, which a forked child of its process is not."""
        if self._driver is not None:
            self._given.birthplace.require()
        return self._driver

    # What the user calls

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes that begin inside accumulate gradients on this rank alone. The next one outside sends all."""
        if self.driver is None:
            yield
            return
        with self.driver.no_sync():
            yield

    def wait(self) -> None:
        """Average gradients that only this rank has, now and not at the next step. All ranks call it."""
        if self.driver is not None:
            self.driver.wait()

    def drain(self) -> None:
        """Let what is under way arrive and use it: before evaluating, and at the end. All ranks call it."""
        if self.driver is not None:
            self.driver.drain()

    def serve(self) -> bool:
        """On a rank that is a server and nothing else: serve until all workers have left, and return True."""
        return self.driver.serve() if self.driver is not None else False

    @contextmanager
    def away(self) -> Iterator[None]:
        """In modes with servers: nobody waits for this worker while it is inside; then it has today's parameters."""
        if self.driver is None:
            yield
            return
        with self.driver.away():
            yield

    @contextmanager
    def join(self, divide_by: DivideBy = "world") -> Iterator[None]:
        """For loops with different numbers of batches: a rank that is done keeps the others company.

        Gradients are divided by the number of all ranks, or of those that still have data (`"active"`). At the end
        every rank has the parameters, buffers and optimizer state of one that trained to the last, and the scale of the
        GradScaler, if there is one. A schedule of learning rates is to be stepped equally often by all ranks.
        """
        if divide_by not in DIVISORS:
            raise UnknownName("divide_by", divide_by, DIVISORS)
        if self.driver is None:
            yield
            return
        refuse_shared_statistics(self.model)
        with self._joining(self.driver, divide_by):
            yield
            self.driver.keep_company()

    @contextmanager
    def _joining(self, driver: Driver, divide_by: DivideBy) -> Iterator[None]:
        """A rank that is done does not know in which order the others come to the passes of several models."""
        if self._given.in_join:
            raise ConfigError(
                "another Sync is inside join() already, and a rank that is done can keep company to one only; make one "
                "Sync of all models, in an nn.ModuleList, with a list of their optimizers"
            )
        self._given.in_join = True
        try:
            driver.join(divide_by)
            yield
        finally:
            driver.join(None)
            self._given.in_join = False

    def reconfigure(
        self,
        *,
        mode: str | Mode | None = None,
        codec: str | Codec | None = None,
        collective: str | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        """Go on with other settings from here, between two steps. All ranks call it, with the same settings.

            if epoch == 5:
                sync.reconfigure(codec="topk:0.01", bucket_bytes=4 << 20)

        What is not given stays as it is. What is under way arrives first, as with `drain()`. Residuals are kept; where
        the new codec has no error feedback they are sent densely with the next gradients, and in modes that average
        parameters at once. The warm-up of a new mode begins here. It is what saving, making a Sync with these settings
        and loading would do. Modes with servers cannot be changed to or from.
        """
        given: dict[str, Any] = {"collective": collective, "bucket_bytes": bucket_bytes}
        given |= {"mode": None if mode is None else mode_of(mode), "codec": None if codec is None else codec_of(codec)}
        self._adopt(replace(self.settings, **{name: value for name, value in given.items() if value is not None}))

    def _adopt(self, wanted: Settings) -> None:
        """Let another driver go on from where the one before it is, which stays if that is impossible."""
        self._refuse_closed()
        refuse_servers(self.settings, wanted)
        check_collective(wanted.collective)
        driver = self.driver
        if driver is None:
            self.settings = wanted
            if self._given.world >= (self.least_world or wanted.least_world):
                self._begin()
            return
        driver.announce(wanted)
        replica = self._replica(wanted)
        if (wanted.mode, wanted.codec) == (self.settings.mode, self.settings.codec):
            state = driver.state_dict()
            adopted = wanted.mode.start(replica)
            adopted.load_state_dict(state)
        else:
            driver.quiesce(wanted)
            residuals = driver.residuals()
            if wanted.codec != self.settings.codec:
                residuals = residuals | {"state": {}}
            adopted = wanted.mode.start(replica)
            adopted.take_over(residuals, driver)
        driver.close()
        if self.fabric is not None and self.fabric is not replica.fabric:
            self.fabric.close()
        self.settings, self.fabric, self._driver = wanted, replica.fabric, adopted
        adopted.new_gradients = self.stepped.clear

    def report(self, last: int = 100) -> Totals:
        """What the last steps cost: compute, hidden and exposed communication, waiting for others."""
        return mean_totals(list(self.recorder.steps)[-last:])

    def quality(self) -> list[Quality]:
        """What each codec left out of each bucket and what it kept, sampled every 50 steps; empty without a codec."""
        return self.driver.quality() if self.driver is not None else []

    def staleness(self) -> Staleness:
        """How old the parameters were that this worker's gradients were computed from; of modes with servers."""
        return self.driver.staleness() if self.driver is not None else Staleness({})

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on as if it had not been interrupted; every rank saves its own."""
        saved: dict[str, Any] = {
            "version": STATE_VERSION,
            "rank": 0,
            "world": 1,
            **self._lasting(),
            "stepped_optimizers": [number for number, one in enumerate(self.optimizers) if one in self.stepped],
        }
        if self.driver is not None and self.fabric is not None:
            saved |= {"rank": self.fabric.rank, "world": self.fabric.world} | self.driver.state_dict()
        return saved

    def load_state_dict(self, saved: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from this rank's own state, or from the states of all ranks, which may have been more or fewer.

        With another number of ranks each starts with the mean of what all had kept, so that nothing is lost: one that
        is alone now has it in its first step. A rank that had nobody to talk to may have kept nothing, and then there
        is nothing to go on from. A state that was saved with another mode or codec goes on as after `reconfigure`.
        """
        self._refuse_closed()
        states = [saved] if isinstance(saved, dict) else list(saved)
        if self.driver is None and not any(map(holds_work, states)):
            return
        chosen = choose_state(states, self._given.rank, self._given.world)
        saved_with, wanted = self._settings_of(chosen), self.settings
        if saved_with is not wanted:
            log.warning("the state was saved with %s; it goes on with %s", described(saved_with), described(wanted))
            self._begin_again(saved_with)
        driver = self.driver or self._begin()
        if "codec_state" in chosen:
            driver.load_state_dict(chosen)
            numbers = chosen["stepped_optimizers"]
            self.stepped.clear()
            self.stepped.update(one for number, one in enumerate(self.optimizers) if number in numbers)
        if saved_with is not wanted:
            self._adopt(wanted)

    def _settings_of(self, saved: dict[str, Any]) -> Settings:
        """The settings that a state was saved with: these, or others that `reconfigure` can go on from."""
        if all(saved[name] == text for name, text in self._lasting().items()):
            return self.settings
        saved_with = replace(self.settings, mode=mode_of(saved["mode"]), codec=codec_of(saved["codec"]))
        refuse_servers(saved_with, self.settings)
        return saved_with

    def _begin_again(self, settings: Settings) -> None:
        """Let the mode of other settings begin instead."""
        if self._driver is not None:
            self._driver.close()
        self.settings = settings
        if self.fabric is not None:
            self._driver = settings.mode.start(self._replica(settings))
            self._driver.new_gradients = self.stepped.clear

    def _refuse_closed(self) -> None:
        if not self._endings:
            raise ConfigError("this Sync is closed, so nothing can go on with it; make another")

    def _lasting(self) -> dict[str, str]:
        """What must be the same when a run goes on."""
        return {"mode": text_of_mode(self.settings.mode.lasting()), "codec": text_of_codec(self.settings.codec)}

    @property
    def reducer(self) -> Reducer | None:
        """What averages gradients, in modes that do."""
        return self.driver.reducer if self.driver is not None else None

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order in which buckets leave."""
        return self.reducer.layout.planned_names() if self.reducer is not None else []

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "a Sync is neither copied nor pickled: it belongs to this model on this rank. Keep it outside of the "
            "model; to save it there is state_dict()"
        )

    def close(self) -> None:
        """Let go of the model and the optimizer. Gradients that are under way are used first."""
        if self.driver is not None and self._endings:
            self.driver.finish()
        for end in self._endings:
            end()
        self._endings.clear()
        self._claim.release()
        if self.driver is not None and self.fabric is not None:
            self.driver.close()
            self.fabric.close()

    # What happens by itself

    def _before_step(self, optimizer: Optimizer) -> Step:
        """Make gradients what the optimizer should see, and say who is to make a step with them."""
        if self._given.world == 1:
            refuse_outlived(self._given)
        if self.driver is not None:
            self.membership.check(optimizer)
            self._refuse_other_scalers(self.driver)
        if self._begins_round(optimizer):
            self.stepped.clear()
            self.judged.clear()
            if self.driver is not None:
                self.driver.before_round()
                self.membership.refuse_replaced(self.driver.without_gradient())
        if self.driver is not None:
            self.driver.before_step(optimizer)
        self.skips = self._judge(self.driver)
        if self._skips(optimizer):
            return Step.NOBODY
        return self.driver.makes_step() if self.driver is not None else Step.HERE

    def _judge(self, driver: Driver | None) -> bool:
        """Whether steps with gradients that have this problem are skipped, which is decided once in a round."""
        problem = driver.problem if driver is not None else ""
        if problem not in self.judged:
            harm = driver.harm_done() if problem and driver is not None else ""
            self.judged[problem] = bool(problem) if self._scaler_judges() else self.skipping.judge(problem, harm)
        return self.judged[problem]

    def _begins_round(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer is the first with the gradients at hand."""
        return optimizer in self.stepped or not self.stepped

    def _refuse_other_scalers(self, driver: Driver) -> None:
        """Refuse a GradScaler that this Sync was not given, where ranks would come apart by what it does alone."""
        reason = driver.needs_scaler() if self.scaler is None else "this Sync was given another one"
        if reason and stepping_scaler() not in (None, self.scaler):
            raise ConfigError(
                f"a GradScaler makes this step that Sync does not know, and {reason}; say syncline.Sync(..., "
                f"scaler=scaler)"
            )

    def _before_unscale(self, optimizer: Optimizer) -> None:
        """Let the scaler see means: a rank without a backward pass takes part in that of the others now."""
        if self.driver is not None and optimizer in self.optimizers and self._begins_round(optimizer):
            self.driver.wait()

    def _after_unscale(self) -> None:
        """The scaler has divided gradients by its scale."""
        if self.driver is not None:
            self.driver.unscaled()

    def _after_scaler_step(self, optimizer: Optimizer) -> None:
        """The scaler has let an optimizer make its step, or has left it out."""
        if self.driver is not None and optimizer in self.optimizers:
            self.driver.after_scaler(optimizer)

    def _after_update(self) -> None:
        """The scaler has updated its scale."""
        if self.driver is not None:
            self.driver.after_update()

    def _scaler_judges(self) -> bool:
        """Whether each optimizer's gradients are right or not by themselves, and a GradScaler looks at them."""
        is_asked = self.scaler is not None and self.settings.nonfinite == "skip"
        return is_asked and self.driver is not None and not self.driver.spoils_all

    def _skips(self, optimizer: Optimizer) -> bool:
        """Whether the step that is skipped is also this optimizer's: a GradScaler judges each by its own gradients.

        They are looked at as they are now, because what was clipped together with an infinity may be NaN.
        """
        if not self.skips or not self._scaler_judges():
            return self.skips
        return not has_finite_gradients(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        """The step has been made, or left out."""
        if not self.stepped:
            self.recorder.end_step(monotonic_ns(), self.skips)
        self.stepped.add(optimizer)
        if self.driver is not None:
            self.driver.after_step(optimizer)
            if len(self.stepped) == len(self.optimizers):
                self.driver.after_round(self.skips)


def check_collective(collective: str) -> None:
    """Refuse a name that is unknown."""
    if collective not in ("auto", "engine"):
        algorithm(collective)


def described(settings: Settings) -> str:
    """The settings that a checkpoint depends on, as they are written."""
    return f"mode={text_of_mode(settings.mode)}, codec={text_of_codec(settings.codec)}"


def refuse_servers(now: Settings, wanted: Settings) -> None:
    """Refuse to change to a mode with servers or away from one, or anything else while one is in force."""
    for mode in (now.mode, wanted.mode):
        if mode.has_servers:
            raise ConfigError(
                f"mode={text_of_mode(now.mode)} cannot become {text_of_mode(wanted.mode)} in a run, because parameters "
                f"and optimizer state of mode {mode.name} are with its servers; save the model, close this Sync and "
                f"make another"
            )


def find_fabric(fabric: Fabric | str) -> Fabric:
    """The one that was given, the current one, or the one that `init` finds."""
    if isinstance(fabric, Fabric):
        refuse_outlived(fabric)
        return fabric
    if fabric not in ("auto", "shm", "torch"):
        raise UnknownName("fabric", fabric, ("auto", "shm", "torch"))
    from syncline.launch.init import find

    return find(fabric)


def list_optimizers(given: object) -> list[Optimizer]:
    """One or several; anything else is refused."""
    several: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if not several:
        raise ConfigError("no optimizer was given, so nobody would step with the gradients")
    for one in several:
        if not isinstance(one, Optimizer):
            raise ConfigError(f"{type(one).__name__} is not a torch.optim.Optimizer, so its step cannot be watched")
    return several
