"""`Sync`: the one line that keeps replicas in step.

    sync = syncline.Sync(model, optimizer)

It stands between `backward()` and `optimizer.step()`, through hooks of both, and holds no algorithm: buckets
(`buckets/`), the path of each (`pipeline.py`), what keeps a run safe (`guards/`) and what it cost (`tracing/`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.buckets.parameters import Named, check_parameters, describe_layout, parameters_of, sparse_names
from syncline.buckets.reducer import Reducer, Verdict
from syncline.codecs.codec import Codec
from syncline.codecs.feedback import Units
from syncline.codecs.registry import codec_of, text_of_codec
from syncline.collectives.registry import algorithm
from syncline.current import current
from syncline.errors import ConfigError, UnknownName
from syncline.fabric.base import Fabric
from syncline.guards.divergence import compare_replicas
from syncline.guards.finite import POLICIES, Policy, Skipping, WithheldGradients, is_finite
from syncline.pipeline import CodecPipeline, make_pipeline
from syncline.replicas import (
    average_buffers,
    broadcast_optimizers,
    broadcast_tensors,
    compare_layouts,
    model_tensors,
    optimizer_tensors,
)
from syncline.state import STATE_VERSION, choose_state
from syncline.tracing.quality import Quality
from syncline.tracing.spans import Recorder
from syncline.tracing.totals import Totals, mean_totals
from syncline.units import MIB

Buffers = Literal["broadcast", "average", "local"]
BUFFERS: tuple[Buffers, ...] = ("broadcast", "average", "local")
DIVISORS = ("world", "active")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen; all ranks choose the same."""

    codec: Codec  # how much is said
    collective: str  # who sends what to whom
    bucket_bytes: int  # larger has fewer messages, smaller starts earlier
    first_bucket_bytes: int  # small, so that communication starts early
    accumulate: int  # backward passes per optimizer step; gradients add up, as they do in torch
    buffers: Buffers  # of modules, such as BatchNorm's statistics
    nonfinite: Policy  # what to do about NaN and infinity: skip the step, raise, or ignore
    most_skips: int  # in a row, before it is an error
    check_every: int  # compare replicas bit by bit every so many steps; 0 is never
    seed: int  # of what codecs draw at random

    def __post_init__(self) -> None:
        for name, least in (
            ("bucket_bytes", 1),
            ("first_bucket_bytes", 1),
            ("accumulate", 1),
            ("check_every", 0),
            ("most_skips", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} is less than {least}")
        if self.buffers not in BUFFERS:
            raise UnknownName("buffers", self.buffers, BUFFERS)
        if self.nonfinite not in POLICIES:
            raise UnknownName("nonfinite", self.nonfinite, POLICIES)


class Sync:
    """Keeps the replicas of a model in step.

    Every rank builds the same model and optimizer, and then this. Parameters and buffers are those of rank 0 from here
    on; when `backward()` returns, gradients are means over ranks, so that clipping sees what the optimizer will use.
    Settings are those of `Settings`; `fabric` is one from `run` or `init`, or `"auto"` for the current one.
    """

    least_world: ClassVar[int] = 2  # ranks from which on there is anything to synchronize

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        fabric: Fabric | str = "auto",
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
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if collective not in ("auto", "engine"):
            algorithm(collective)  # a name that is unknown is refused here
        self.model = model
        self.optimizers = list_optimizers(optimizer)
        self.scaler = scaler  # what is kept by error feedback follows its scale
        self.settings = Settings(
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
        )
        self.recorder = Recorder()
        self.skipping = Skipping(self.settings.nonfinite, self.settings.most_skips)
        self.withheld = WithheldGradients()
        self.stepped: set[Optimizer] = set()  # with the gradients at hand
        self.skips = False  # the step with these gradients
        self.problem = ""  # with the gradients at hand, the same on every rank
        self.divide_by: Literal["world", "active"] = "world"
        self.last_active = 0  # the lowest rank that took part with data in the last pass of any
        named = parameters_of(model)
        if not any(parameter.requires_grad for _, parameter in named):
            raise ConfigError("no parameter of the model needs a gradient, so there is nothing to synchronize")
        given = find_fabric(fabric)
        check_parameters(model, named, given.device)
        self.fabric: Fabric | None = None
        self.reducer: Reducer | None = None
        if given.world >= self.least_world:
            self._join_others(given, named)
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self.optimizers]
        self._hooks += [optimizer.register_step_post_hook(self._after_step) for optimizer in self.optimizers]
        self.recorder.begin(monotonic_ns())

    def _join_others(self, given: Fabric, named: Named) -> None:
        """Compare with the other ranks, start from the state of rank 0, and watch gradients."""
        if self.settings.collective == "engine":
            given = given.with_engine()
        collective = self.settings.collective
        if collective == "auto" and given.has_engine:
            collective = "engine"  # NCCL and Gloo do it without Python in between
        fabric = given.sibling()
        compare_layouts(fabric, describe_layout(named, self.model.named_buffers(), [f"settings {self.settings}"]))
        broadcast_tensors(fabric, model_tensors(self.model))
        self.fabric = fabric
        self.reducer = Reducer(
            fabric,
            make_pipeline(
                fabric,
                collective,
                self.recorder,
                self.settings.codec,
                self.settings.seed,
                self._units,
            ),
            named,
            sparse_names(self.model),
            self.settings.first_bucket_bytes,
            self.settings.bucket_bytes,
            self.settings.accumulate,
            self._at_the_end_of_a_pass,
        )

    # What the user calls

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes that begin inside accumulate gradients on this rank alone. The next one outside sends all."""
        if self.reducer is None:
            yield
            return
        before, self.reducer.is_paused = self.reducer.is_paused, True
        try:
            yield
        finally:
            self.reducer.is_paused = before

    def wait(self) -> None:
        """Average gradients that only this rank has, now and not at the next step. All ranks call it."""
        if self.reducer is not None:
            self.reducer.before_step()

    @contextmanager
    def join(self, divide_by: Literal["world", "active"] = "world") -> Iterator[None]:
        """For loops with different numbers of batches: a rank that is done keeps the others company.

        Gradients are divided by the number of all ranks, or of those that still have data (`"active"`). At the end
        every rank has the parameters, buffers and optimizer state of one that trained to the last.
        """
        if divide_by not in DIVISORS:
            raise UnknownName("divide_by", divide_by, DIVISORS)
        if self.reducer is None or self.fabric is None:
            yield
            return
        self.divide_by = divide_by
        yield
        while self.reducer.synchronize(has_data=False).active:
            pass
        self.divide_by = "world"
        self._take_state_of(self.last_active)

    def report(self, last: int = 100) -> Totals:
        """What the last steps cost: compute, hidden and exposed communication, waiting for others."""
        return mean_totals(list(self.recorder.steps)[-last:])

    def quality(self) -> list[Quality]:
        """How much of each bucket its codec left out, sampled every 50 steps; empty without error feedback."""
        pipeline = self.reducer.pipeline if self.reducer is not None else None
        return list(pipeline.watch.samples) if isinstance(pipeline, CodecPipeline) else []

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on as if it had not been interrupted; every rank saves its own."""
        saved: dict[str, Any] = {
            "version": STATE_VERSION,
            "rank": 0,
            "world": 1,
            "codec": text_of_codec(self.settings.codec),
        }
        if self.reducer is not None and self.fabric is not None:
            saved |= {"rank": self.fabric.rank, "world": self.fabric.world, "layout": self.reducer.layout()}
            saved["codec_state"] = self.reducer.pipeline.state_dict()
        return saved

    def load_state_dict(self, saved: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from this rank's own state, or from the states of all ranks, which may have been more or fewer.

        With another number of ranks each starts with the mean of what all had kept, so that nothing is lost.
        """
        states = [saved] if isinstance(saved, dict) else list(saved)
        if self.reducer is None or self.fabric is None:
            return
        chosen = choose_state(states, self.fabric.rank, self.fabric.world, text_of_codec(self.settings.codec))
        self.reducer.restore(chosen["layout"])
        self.reducer.pipeline.load_state_dict(chosen["codec_state"])

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order in which buckets leave."""
        if self.reducer is None:
            return []
        return [[slot.name for slot in slots] for slots in self.reducer.planned()]

    def close(self) -> None:
        """Let go of the model and the optimizer, which stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.withheld.give_back()
        if self.reducer is not None and self.fabric is not None:
            self.reducer.close()
            self.fabric.close()

    # What happens by itself

    def _at_the_end_of_a_pass(self, verdict: Verdict) -> None:
        """All that ranks say to each other besides gradients; every rank comes by here in every pass."""
        assert self.reducer is not None
        assert self.fabric is not None
        root = self.last_active = verdict.active[0] if verdict.active else self.last_active
        buffers = [buffer for buffer in self.model.buffers() if buffer.numel()]
        if self.settings.buffers == "broadcast":
            broadcast_tensors(self.fabric, buffers, root)
        elif self.settings.buffers == "average":
            average_buffers(self.fabric, buffers, root)
        if self.divide_by == "active" and verdict.active:
            self.reducer.scale(self.fabric.world / len(verdict.active))
        everyone = len(verdict.active) == self.fabric.world
        if everyone and self.settings.check_every and self.reducer.passes % self.settings.check_every == 0:
            compare_replicas(self.fabric, self._replicated(), f"before step {self.reducer.passes}")
        self.stepped.clear()
        self.problem = self._what_is_wrong(verdict)

    def _what_is_wrong(self, verdict: Verdict) -> str:
        """With the gradients at hand; empty if nothing is."""
        assert self.reducer is not None
        if verdict.failed:
            return "a rank failed in its backward pass"
        if verdict.bad:
            names = [slot.name for slot in self.reducer.buckets[verdict.bad[0]].slots]
            return f"the gradient of one of {', '.join(names[:3])} is not finite on some rank"
        return self._what_is_not_finite()

    def _units(self) -> Units:
        """What gradients are worth now."""
        rates = {
            id(p): float(group["lr"]) for o in self.optimizers for group in o.param_groups for p in group["params"]
        }
        named = parameters_of(self.model)
        scale = self.scaler.get_scale() if self.scaler is not None else 1.0
        return Units({name: rates[id(p)] for name, p in named if id(p) in rates}, scale)

    def _what_is_not_finite(self) -> str:
        """Which gradients are NaN or infinite; empty if none is."""
        if self.settings.nonfinite == "ignore" or self.reducer is None:
            return ""
        for bucket in self.reducer.buckets:
            if not is_finite(bucket.values):
                bad = [slot.name for slot in bucket.slots if not is_finite(slot.view)]
                return f"the gradient of {bad[0] if bad else 'a parameter'} is not finite"
        for slot in self.reducer.sparse:
            gradient = slot.parameter.grad
            if gradient is not None and not is_finite(gradient.coalesce().values()):
                return f"the gradient of {slot.name} is not finite"
        return ""

    def _replicated(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that must be equal on all ranks, by name."""
        named = parameters_of(self.model)
        names = {id(parameter): name for name, parameter in named}
        yield from named
        everything = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        for position, what, tensor in optimizer_tensors(self.optimizers):
            yield f"optimizer state {what} of {names.get(id(everything[position]), f'parameter {position}')}", tensor

    def _take_state_of(self, root: int) -> None:
        """Give everyone what one rank has."""
        assert self.fabric is not None
        broadcast_tensors(self.fabric, model_tensors(self.model), root)
        broadcast_optimizers(self.fabric, self.optimizers, root)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Nothing but synchronized, finite gradients reach the optimizer."""
        if optimizer in self.stepped or not self.stepped:
            self.stepped.clear()
            if self.reducer is not None:
                self.reducer.before_step()
            self.skips = self.skipping.judge(self.problem)
        if self.skips:
            self.withheld.withhold(p for group in optimizer.param_groups for p in group["params"])

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self.withheld.give_back()
        if not self.stepped:
            self.recorder.end_step(monotonic_ns(), self.skips)
        self.stepped.add(optimizer)
        if self.reducer is not None:
            self.reducer.after_step()


def find_fabric(fabric: Fabric | str) -> Fabric:
    """The one that was given, the current one, or the one that `init` finds."""
    if isinstance(fabric, Fabric):
        return fabric
    if fabric not in ("auto", "shm", "torch"):
        raise UnknownName("fabric", fabric, ("auto", "shm", "torch"))
    found = current() if fabric == "auto" else None
    if found is not None:
        return found
    from syncline.launch import init

    return init(fabric=fabric)


def list_optimizers(given: object) -> list[Optimizer]:
    """One or several; anything else is refused."""
    several: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for one in several:
        if not isinstance(one, Optimizer):
            raise ConfigError(f"{type(one).__name__} is not a torch.optim.Optimizer, so its step cannot be watched")
    return several
