"""Codecs for plain DistributedDataParallel, as a communication hook.

    hook = syncline.integrations.ddp.attach(ddp_model, "topk:0.01", optimizer, scaler=scaler)
    torch.save({"model": ..., "hook": hook.state_dict()}, f"checkpoint-{rank}.pt")      # every rank its own

What is kept belongs to parameters and not to buckets, so that DDP may make new buckets after its first step. A bucket
that is not finite on some rank is averaged as it is, so that GradScaler sees it and skips the step. DDP has been given
other buckets of that pass by then; but what was kept, of all of them, stays as it was before the pass. So until the end
of a pass there are two copies of what is kept; `Sync`, which hands out no mean before all are there, has one.

With `find_unused_parameters=True` DDP throws away what comes of a parameter that no rank has used, and leaves its
gradient as it is. It does not tell hooks, so this one watches gradients come and asks the other ranks, in the message
that also says whether all is finite: what was kept of such a parameter stays.

A new DDP has other buckets in its first step than later, and what codecs choose depends on buckets. A run that goes on
from a state therefore takes the gradients of its first pass together as those of the saved run were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from syncline.codecs.codec import Codec, Part, ReduceContext, State
from syncline.codecs.registry import codec_of, text_of_codec
from syncline.errors import ConfigError
from syncline.fabric.call_thread import CallThread
from syncline.fabric.handle import Times
from syncline.fabric.torch import torch_fabric
from syncline.guards.claims import refuse_claimed
from syncline.guards.finite import is_finite
from syncline.guards.trainable import has_sparse_gradient
from syncline.path.answerer import FlatAnswerer, converse
from syncline.path.codec_state import KINDS, BucketCodecState, state_of
from syncline.path.residuals import GradientScale
from syncline.state import STATE_VERSION, choose_state


def attach(
    model: DistributedDataParallel,
    codec: str | Codec,
    optimizer: Optimizer | None = None,
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> CodecHook:
    """Let DDP send its buckets through a codec. What is kept follows the optimizer's rates and the scaler's scale."""
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"{type(model).__name__} is not a DistributedDataParallel; for others there is syncline.Sync")
    refuse_parameters(model.module)
    hook = CodecHook(model, codec_of(codec), optimizer, seed, scaler)
    model.register_comm_hook(hook, lambda state, bucket: state.start(bucket))
    return hook


def refuse_parameters(module: nn.Module) -> None:
    """Those that a `Sync` has too, and those whose gradients are sparse."""
    for name, part in module.named_modules():
        if has_sparse_gradient(part):
            raise ConfigError(
                f"{name}.weight has sparse gradients, which DDP gives to no hook as they are; make it with "
                f"sparse=False, or use syncline.Sync, which averages them"
            )
    refuse_claimed((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


@dataclass(frozen=True)
class Arrived:
    """A bucket as DDP has given it."""

    flat: Tensor
    parts: tuple[Part, ...]
    future: torch.futures.Future[Tensor]  # what DDP waits for

    @property
    def names(self) -> list[str]:
        """Of its parameters."""
        return [part.name for part in self.parts]

    def slices(self) -> dict[str, tuple[Part, Tensor]]:
        """The gradients of its parameters."""
        return {part.name: (part, self.flat[part.lo : part.hi]) for part in self.parts}


@dataclass
class Pass:
    """One backward pass. What it leaves to be kept counts when all its buckets were finite on all ranks."""

    step: int
    scale: GradientScale  # what gradients are worth
    used: set[str]  # parameters that this rank has a gradient of
    arrived: list[Arrived] = field(default_factory=list)
    residuals: dict[str, Tensor] = field(default_factory=dict)
    state: State = field(default_factory=dict)
    is_good: bool = True

    def forget(self) -> None:
        """What it was about, which is DDP's."""
        self.arrived, self.residuals, self.state = [], {}, {}


class CodecHook:
    """What DDP calls with every bucket. A thread talks about one bucket after the other while backward goes on."""

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: Codec,
        optimizer: Optimizer | None,
        seed: int,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.codec = codec
        self.seed = seed
        self.optimizer = optimizer
        self.scaler = scaler
        self.names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self.leaves_unused = model.find_unused_parameters or model.static_graph  # where no rank has a gradient
        self.used = self.used_at_first()  # since the last pass that was averaged
        self.watches = self.watch(model) if self.leaves_unused else []
        self.fabric = torch_fabric(model.process_group).subgroup()
        self.answerer = FlatAnswerer([self.fabric.channel()], "auto")
        self.thread = CallThread(f"rank {self.fabric.rank} encodes for DDP")
        self.fabric.at_close.append(lambda: self.thread.close(drain=False))
        self.residuals: dict[str, Tensor] = {}
        self.step_scales: dict[str, float] = {}
        self.state: State = {}
        self.step = 0  # passes that came to their end
        self.now = Pass(0, GradientScale({}), self.used)
        self.buckets: list[list[str]] = []  # of the last pass, by the names of parameters
        self.saved_buckets: list[list[str]] | None = None  # for the first pass of a run that goes on

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
        if bucket.index() == 0:
            self.now = Pass(self.step + 1, self.scale(), self.used)
        arrived = Arrived(bucket.buffer(), self.parts_of(bucket.parameters()), torch.futures.Future())
        now, is_last = self.now, bucket.is_last()
        now.arrived.append(arrived)
        if is_last:
            self.step += 1
            self.used = self.used_at_first()
        if self.saved_buckets is None:
            self.submit(partial(self.average, arrived.flat, arrived.parts, now), [arrived], now, is_last)
        elif is_last:
            self.submit(partial(self.average_as_saved, self.saved_buckets, now), now.arrived, now, is_last)
            self.saved_buckets = None
        return arrived.future

    def submit(self, work: Callable[[], None], answered: Sequence[Arrived], now: Pass, is_last: bool) -> None:
        """Have the thread do it when it is done with what came before, and tell DDP."""

        def answer() -> Times:
            try:
                work()
                if is_last:
                    self.commit(now)
                for arrived in answered:
                    arrived.future.set_result(arrived.flat)
            except Exception as error:
                now.is_good = False
                for arrived in answered:
                    arrived.future.set_exception(error)  # type: ignore[arg-type]
            return Times(0, 0, 0)

        self.thread.submit(answer, "a bucket of DDP", self.fabric.deadlines.operation)

    def average_as_saved(self, buckets: list[list[str]], now: Pass) -> None:
        """The gradients of a whole pass, taken together as in another run; what that did not have, as it came."""
        came = {name: found for arrived in now.arrived for name, found in arrived.slices().items()}
        known = {name for names in buckets for name in names}
        others = [[name for name in arrived.names if name not in known] for arrived in now.arrived]
        for names in buckets + others:
            together = [came[name] for name in names if name in came]
            if not together:
                continue
            flat = torch.cat([values for _, values in together])
            parts = in_a_row(part for part, _ in together)
            self.average(flat, parts, now)
            for (_, values), part in zip(together, parts, strict=True):
                values.copy_(flat[part.lo : part.hi])

    def average(self, flat: Tensor, parts: tuple[Part, ...], now: Pass) -> None:
        """Replace a bucket by the mean over ranks of what was sent, which has the same bits on all of them."""
        work = flat.to(torch.float32, copy=True)
        coded = self.coded_of(parts, work.device)
        context = ReduceContext(self.fabric.rank, self.fabric.world, now.step, self.seed, parts, now.scale.loss_scale)
        state = coded.state | coded.correct(work, context)
        self.add_residuals(work, parts, now.scale)
        is_bad, used = self.agree(work, parts, now)
        if is_bad:
            self.fabric.all_reduce(work, op="mean")
        else:
            self.encode(work, state, context, now, used)
        for part in used:
            flat[part.lo : part.hi] = work[part.lo : part.hi]
        now.is_good &= is_finite(flat)

    def agree(self, work: Tensor, parts: tuple[Part, ...], now: Pass) -> tuple[bool, list[Part]]:
        """Whether something is not finite on some rank, and which parameters some rank has used."""
        own = [not is_finite(work), *(part.name in now.used for part in parts)]
        told = self.fabric.all_reduce(torch.tensor(own, dtype=torch.int32, device=work.device), op="max")
        is_bad, *flags = told.tolist()
        return bool(is_bad), [part for part, flag in zip(parts, flags, strict=True) if flag]

    def encode(self, work: Tensor, state: State, context: ReduceContext, now: Pass, used: Sequence[Part]) -> None:
        """Carry the codec's conversation through, and note what is to be kept."""
        decoder, _ = converse(self.codec.reduce(work, state, context), self.answerer, self.fabric.rank)
        now.state |= state_of(state, {part.name for part in used})
        if self.codec.feedback:
            counting = [part for part in used if now.scale.step_scale(part.name)]
            now.residuals |= {part.name: work[part.lo : part.hi].clone() for part in counting}
        decoder(work)

    def commit(self, now: Pass) -> None:
        """Keep what a good pass has left."""
        self.buckets = [arrived.names for arrived in now.arrived]
        if now.is_good:
            self.residuals |= now.residuals
            self.step_scales |= {name: now.scale.step_scale(name) for name in now.residuals}
            self.state |= now.state
        now.forget()

    def parts_of(self, parameters: Iterable[Tensor]) -> tuple[Part, ...]:
        """The parameters of a bucket by name and context."""
        named = ((self.names[id(p)], torch.view_as_real(p) if p.is_complex() else p) for p in parameters)
        return in_a_row(Part(name, 0, real.numel(), real.shape) for name, real in named)

    def coded_of(self, parts: tuple[Part, ...], device: torch.device) -> BucketCodecState:
        """The state of the parameters of a bucket, new where there is none yet."""
        coded = BucketCodecState.begin(self.codec, parts, device, feedback=False)
        coded.state = {key: self.state.get(key, value) for key, value in coded.state.items()}
        return coded

    def scale(self) -> GradientScale:
        """What gradients are worth now."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        rates = {self.names.get(id(p), ""): float(group["lr"]) for group in groups for p in group["params"]}
        return GradientScale(rates, self.scaler.get_scale() if self.scaler is not None else 1.0)

    def add_residuals(self, work: Tensor, parts: tuple[Part, ...], scale: GradientScale) -> None:
        """Error feedback, as `path/residuals.py` has it, by parameter."""
        for part in parts:
            now = scale.step_scale(part.name)
            if part.name in self.residuals and now:
                work[part.lo : part.hi].add_(self.residuals[part.name], alpha=self.step_scales[part.name] / now)

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on; every rank saves its own."""
        return {
            "version": STATE_VERSION,
            "rank": self.fabric.rank,
            "world": self.fabric.world,
            **self._lasting(),
            "step": self.step,
            "buckets": self.buckets,
            "codec_state": {
                "residual": dict(self.residuals),
                "step_scale": dict(self.step_scales),
                "state": dict(self.state),
            },
        }

    def load_state_dict(self, saved: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from this rank's own state, or from the states of all ranks, as `Sync` does."""
        states = [saved] if isinstance(saved, dict) else list(saved)
        chosen = choose_state(states, self.fabric.rank, self.fabric.world, self._lasting())
        kinds = chosen["codec_state"]
        self.step = chosen["step"]
        self.saved_buckets = chosen["buckets"] or None
        self.residuals, self.step_scales, self.state = (dict(kinds[kind]) for kind in KINDS)

    def _lasting(self) -> dict[str, str]:
        """What must be the same when a run goes on."""
        return {"codec": text_of_codec(self.codec)}

    def close(self) -> None:
        """Let the thread and the process group of the hook end."""
        for handle in self.watches:
            handle.remove()
        self.fabric.close()


def in_a_row(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The same parts, each where the one before it ends."""
    placed, start = [], 0
    for part in parts:
        end = start + part.hi - part.lo
        placed.append(part._replace(lo=start, hi=end))
        start = end
    return tuple(placed)
