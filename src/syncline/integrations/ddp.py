"""Codecs for plain DistributedDataParallel, as a communication hook.

    hook = syncline.integrations.ddp.attach(ddp_model, "topk:0.01", optimizer)
    torch.save({"model": ..., "hook": hook.state_dict()}, f"checkpoint-{rank}.pt")      # every rank its own

What is kept belongs to parameters and not to buckets, so that DDP may make new buckets after its first step. A bucket
that is not finite on some rank is averaged as it is, so that GradScaler sees it, and what was kept stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.codecs.answers import converse
from syncline.codecs.codec import Codec, Part, Place, State
from syncline.codecs.feedback import Units, worth_of
from syncline.codecs.registry import codec_of, text_of_codec
from syncline.errors import ConfigError
from syncline.fabric.base import Fabric, Times
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.torch import TorchFabric
from syncline.fabric.worker import Worker
from syncline.guards.finite import is_finite


def attach(
    model: DistributedDataParallel, codec: str | Codec, optimizer: Optimizer | None = None, seed: int = 0
) -> CodecHook:
    """Let DDP send its buckets through a codec. With the optimizer, what is kept follows its learning rates."""
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"{type(model).__name__} is not a DistributedDataParallel; for others there is syncline.Sync")
    hook = CodecHook(model, codec_of(codec), optimizer, seed)
    model.register_comm_hook(hook, lambda state, bucket: state.start(bucket))
    return hook


class CodecHook:
    """What DDP calls with every bucket. A thread talks about one bucket after the other while backward goes on."""

    def __init__(self, model: DistributedDataParallel, codec: Codec, optimizer: Optimizer | None, seed: int) -> None:
        self.codec = codec
        self.seed = seed
        self.optimizer = optimizer
        self.names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self.fabric: Fabric = TorchFabric(model.process_group, Deadlines()).sibling()
        self.worker = Worker(f"rank {self.fabric.rank} encodes for DDP")
        self.fabric.at_close.append(lambda: self.worker.close(drain=False))
        self.kept: dict[str, Tensor] = {}
        self.worth: dict[str, float] = {}
        self.state: State = {}
        self.step = 0

    def start(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Begin with a `dist.GradBucket`; the future is what DDP waits for."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        flat = bucket.buffer()
        parts = self.parts_of(bucket.parameters())
        step = self.step
        self.step += bucket.is_last()

        def work() -> Times:
            try:
                self.average(flat, parts, step)
                future.set_result(flat)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            return Times(0, 0, 0)

        self.worker.submit(work, "a bucket of DDP", self.fabric.deadlines.operation)
        return future

    def average(self, flat: Tensor, parts: tuple[Part, ...], step: int) -> None:
        """Replace a bucket by the mean over ranks of what was sent."""
        bad = torch.tensor([int(not is_finite(flat))], dtype=torch.int32, device=flat.device)
        if self.fabric.all_reduce(bad, op="max").item():
            self.fabric.all_reduce(flat, op="mean")
            return
        work = flat.to(torch.float32, copy=True)
        units = self.units()
        self.add_kept(work, parts, units)
        state = self.state_of(parts, flat.device)
        place = Place(self.fabric.rank, self.fabric.world, step, self.seed, parts)
        decoder, _ = converse(self.codec.reduce(work, state, place), self.fabric, "auto")
        self.state |= state
        self.keep(work, parts, units)
        decoder(work)
        flat.copy_(work)

    def parts_of(self, parameters: Iterable[Tensor]) -> tuple[Part, ...]:
        """The parameters of a bucket by name and place."""
        parts, start = [], 0
        for parameter in parameters:
            parts.append(Part(self.names[id(parameter)], start, start + parameter.numel(), parameter.shape))
            start += parameter.numel()
        return tuple(parts)

    def state_of(self, parts: tuple[Part, ...], device: torch.device) -> State:
        """Of the parameters of a bucket, new where there is none yet."""
        fresh = self.codec.start(parts, device)
        return {key: self.state.get(key, value) for key, value in fresh.items()}

    def units(self) -> Units:
        """What gradients are worth now."""
        if self.optimizer is None:
            return Units({})
        groups = self.optimizer.param_groups
        rates = {self.names.get(id(p), ""): float(group["lr"]) for group in groups for p in group["params"]}
        return Units(rates)

    def add_kept(self, work: Tensor, parts: tuple[Part, ...], units: Units) -> None:
        """Error feedback, as `codecs/feedback.py` has it, by parameter."""
        for part in parts:
            now = worth_of(part.name, units)
            if part.name in self.kept and now:
                work[part.lo : part.hi].add_(self.kept[part.name], alpha=self.worth[part.name] / now)

    def keep(self, left: Tensor, parts: tuple[Part, ...], units: Units) -> None:
        """What was not sent."""
        if not self.codec.feedback:
            return
        for part in parts:
            if now := worth_of(part.name, units):
                self.kept[part.name] = left[part.lo : part.hi].clone()
                self.worth[part.name] = now

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on; every rank saves its own."""
        return {
            "codec": text_of_codec(self.codec),
            "step": self.step,
            "kept": dict(self.kept),
            "worth": dict(self.worth),
            "state": dict(self.state),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there."""
        if saved["codec"] != text_of_codec(self.codec):
            raise ConfigError(f"the state was saved with codec={saved['codec']}, not {text_of_codec(self.codec)}")
        self.step = saved["step"]
        self.kept, self.worth, self.state = dict(saved["kept"]), dict(saved["worth"]), dict(saved["state"])

    def close(self) -> None:
        """Let the thread and the process group of the hook end."""
        self.fabric.close()
