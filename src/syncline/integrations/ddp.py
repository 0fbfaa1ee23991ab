"""Codecs for plain DistributedDataParallel, as a communication hook.

    hook = syncline.integrations.ddp.attach(ddp_model, "topk:0.01", optimizer, scaler=scaler)
    torch.save({"model": ..., "hook": hook.state_dict()}, f"checkpoint-{rank}.pt")      # every rank its own

Buckets take the same path as those of `Sync`: what DDP gives is encoded while backward goes on, and DDP has the means
when the status of the pass is known. A bucket that is not finite on some rank becomes NaN on all of them, so that
GradScaler sees it and skips the step; the others become zeros, and no residual of that pass is kept.

With `find_unused_parameters=True` DDP throws away what comes of a parameter that no rank has used, and leaves its
gradient as it is. It does not tell hooks, so this one watches gradients come, and the status says which parameters no
rank had: their residuals stay. There the path works on a copy of a bucket, because DDP's own may hold those gradients.

Residuals belong to parameters and not to buckets, so DDP may make new buckets after its first step. A new DDP has other
buckets in its first step than later, and what codecs choose depends on buckets. A run that goes on from a state
therefore takes the gradients of its first pass together as those of the saved run were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from syncline.codecs.codec import Codec
from syncline.codecs.registry import codec_of, text_of_codec
from syncline.core.state import STATE_VERSION, choose_state
from syncline.core.status import OwnStatus
from syncline.errors import ConfigError
from syncline.fabric.call_thread import CallThread
from syncline.fabric.handle import Times
from syncline.fabric.torch import torch_fabric
from syncline.guards.claims import refuse_claimed
from syncline.guards.trainable import has_sparse_gradient
from syncline.path.codec_state import KINDS
from syncline.path.make import make_path
from syncline.path.residuals import GradientScale
from syncline.path.work import PassWork
from syncline.tracing.spans import Recorder


def attach(
    model: DistributedDataParallel,
    codec: str | Codec,
    optimizer: Optimizer | None = None,
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> CodecHook:
    """Let DDP send its buckets through a codec. Residuals follow the optimizer's rates and the scaler's scale."""
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"{type(model).__name__} is not a DistributedDataParallel; for others there is syncline.Sync")
    refuse_parameters(model.module)
    hook = CodecHook(model, codec_of(codec), optimizer, seed, scaler)
    model.register_comm_hook(hook, lambda state, bucket: state.start(bucket))
    return hook


def refuse_parameters(module: nn.Module) -> None:
    """Refuse those that a `Sync` has too, and those whose gradients are sparse."""
    for name, part in module.named_modules():
        if has_sparse_gradient(part):
            raise ConfigError(
                f"{name}.weight has sparse gradients, which DDP gives to no hook as they are; make it with "
                f"sparse=False, or use syncline.Sync, which averages them"
            )
    refuse_claimed((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


class Gradient(NamedTuple):
    """A parameter's gradient, flat, in the memory of DDP."""

    name: str
    parameter: Tensor  # of the shape that codecs see: a complex one counts as real and imaginary numbers
    values: Tensor


@dataclass(eq=False)
class Memory:
    """What the path works on."""

    values: Tensor
    views: Sequence[Tensor]  # of each gradient
    finite: bool | None = None


class HookBucket:
    """Gradients of DDP that take the path together: one of its buckets, or as many as another run had together."""

    def __init__(self, number: int, slots: Sequence[Gradient], flat: Tensor | None) -> None:
        """`flat` is the memory of all of them, which the path may write to; without it they are copied."""
        self.number = number
        self.slots = slots
        values = flat if flat is not None else torch.cat([slot.values for slot in slots])
        self.buffer = Memory(values, torch.split(values, [len(slot.values) for slot in slots]))
        self.is_copied = flat is None
        self.divisor = 1
        self.finite: bool | None = None
        self.present = [1] * len(slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return self.buffer.values.nbytes

    def give_back(self, unused: Collection[str]) -> None:
        """Let DDP find the means, but of parameters that no rank has used."""
        for slot, view in zip(self.slots, self.buffer.views, strict=True):
            if self.is_copied and slot.name not in unused:
                slot.values.copy_(view)


@dataclass(eq=False)
class HookPass:
    """One backward pass."""

    work: PassWork
    came: list[list[Gradient]] = field(default_factory=list)  # by bucket of DDP
    flats: list[Tensor] = field(default_factory=list)
    futures: list[torch.futures.Future[Tensor]] = field(default_factory=list)  # what DDP waits for
    sent: list[HookBucket] = field(default_factory=list)


class CodecHook:
    """What DDP calls with every bucket. A thread waits for the means of a pass, and tells DDP."""

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: Codec,
        optimizer: Optimizer | None,
        seed: int,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.codec = codec
        self.optimizer = optimizer
        self.scaler = scaler
        self.names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self.leaves_unused = model.find_unused_parameters or model.static_graph  # where no rank has a gradient
        self.used = self.used_at_first()  # since the last pass that was averaged
        self.watches = self.watch(model) if self.leaves_unused else []
        self.fabric = torch_fabric(model.process_group).subgroup()
        self.recorder = Recorder()
        self.path = make_path(self.fabric, "auto", self.recorder, codec, seed, self.scale)
        self.thread = CallThread(f"rank {self.fabric.rank} waits for DDP")
        self.fabric.at_close.append(lambda: self.thread.close(drain=False))
        self.passes = 0
        self.now: HookPass | None = None
        self.numbers: dict[tuple[str, ...], int] = {}  # of buckets, by the names of their parameters
        self.buckets: list[list[str]] = []  # of the last pass, by the names of parameters
        self.saved_buckets: list[list[str]] | None = None  # for the first pass of a run that goes on

    @property
    def step(self) -> int:
        """Passes that all ranks could use."""
        return self.path.good_passes

    def used_at_first(self) -> set[str]:
        """Parameters that count as used before any gradient has come: all, where DDP gives all of them a mean."""
        return set() if self.leaves_unused else set(self.names.values())

    def watch(self, model: DistributedDataParallel) -> list[RemovableHandle]:
        """Note which parameters gradients come of, in passes that are averaged and in those before, as DDP does."""

        def came(parameter: Tensor) -> None:
            self.used.add(self.names[id(parameter)])

        return [p.register_post_accumulate_grad_hook(came) for p in model.module.parameters() if p.requires_grad]

    def start(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Begin with a `dist.GradBucket`; the future is what DDP waits for. Buckets come in order."""
        if self.now is None:
            self.passes += 1
            self.now = HookPass(self.path.begin(self.passes))
        now, flat = self.now, bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        now.came.append(self.gradients_of(flat, bucket.parameters()))
        now.flats.append(flat)
        now.futures.append(future)
        if self.saved_buckets is None:
            self.send(now, now.came[-1], None if self.leaves_unused else flat)
        if bucket.is_last():
            self.end(now)
        return future

    def gradients_of(self, flat: Tensor, parameters: Iterable[Tensor]) -> list[Gradient]:
        """The gradients in a bucket of DDP, in order."""
        gradients, start = [], 0
        for parameter in parameters:
            real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
            gradients.append(Gradient(self.names[id(parameter)], real, flat[start : start + real.numel()]))
            start += real.numel()
        return gradients

    def send(self, now: HookPass, gradients: Sequence[Gradient], flat: Tensor | None) -> None:
        """Let gradients take the path together."""
        number = self.numbers.setdefault(tuple(one.name for one in gradients), len(self.numbers))
        now.sent.append(HookBucket(number, gradients, flat))
        self.path.start(now.work, now.sent[-1])

    def send_as_saved(self, now: HookPass, buckets: list[list[str]]) -> None:
        """Take the gradients of a whole pass together as in another run; what that did not have, as it came."""
        came = {gradient.name: gradient for gradients in now.came for gradient in gradients}
        known = {name for names in buckets for name in names}
        others = [[gradient.name for gradient in gradients if gradient.name not in known] for gradients in now.came]
        for names in buckets + others:
            if together := [came[name] for name in names if name in came]:
                self.send(now, together, None)

    def end(self, now: HookPass) -> None:
        """All buckets of a pass have come: let the status follow, and tell DDP of the means when it has arrived."""
        if self.saved_buckets is not None:
            self.send_as_saved(now, self.saved_buckets)
            self.saved_buckets = None
        for bucket in now.sent:
            bucket.present = [int(slot.name in self.used) for slot in bucket.slots]
        present = [one for bucket in now.sent for one in bucket.present]
        self.path.end(now.work, OwnStatus(self.passes, since_step=1, present=present))
        self.now = None
        self.used = self.used_at_first()
        self.buckets = [[gradient.name for gradient in gradients] for gradients in now.came]

        def answer() -> Times:
            try:
                self.wait(now)
                for future, flat in zip(now.futures, now.flats, strict=True):
                    future.set_result(flat)
            except Exception as error:
                for future in now.futures:
                    future.set_exception(error)  # type: ignore[arg-type]
            return Times(0, 0, 0)

        self.thread.submit(answer, "a pass of DDP", self.fabric.deadlines.operation)

    def wait(self, now: HookPass) -> None:
        """Wait until DDP can have the means, or what shows that there are none."""
        status = self.path.wait(now.work)
        unused = now.work.unused_names()
        for bucket in now.sent:
            if bucket.number in status.nonfinite:
                bucket.buffer.values.fill_(torch.nan)
            bucket.give_back(unused)
        self.recorder.end_step(monotonic_ns(), skipped=not status.is_good)

    def scale(self) -> GradientScale:
        """What gradients are worth now."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        rates = {self.names.get(id(p), ""): float(group["lr"]) for group in groups for p in group["params"]}
        return GradientScale(rates, self.scaler.get_scale() if self.scaler is not None else 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on; every rank saves its own."""
        return {
            "version": STATE_VERSION,
            "rank": self.fabric.rank,
            "world": self.fabric.world,
            **self._lasting(),
            "step": self.step,
            "buckets": self.buckets,
            "codec_state": {kind: {} for kind in KINDS} | self.path.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from this rank's own state, or from the states of all ranks, as `Sync` does."""
        states = [saved] if isinstance(saved, dict) else list(saved)
        chosen = choose_state(states, self.fabric.rank, self.fabric.world, self._lasting())
        self.saved_buckets = chosen["buckets"] or None
        self.path.load_state_dict(chosen["codec_state"])
        self.path.good_passes = chosen["step"]

    def _lasting(self) -> dict[str, str]:
        """What must be the same when a run goes on."""
        return {"codec": text_of_codec(self.codec)}

    def close(self) -> None:
        """Let the threads and the process groups of the hook end."""
        for handle in self.watches:
            handle.remove()
        self.fabric.close()
