"""Contenders: the ways to keep the replicas of a model in step that are compared, each by its name.

    alone                no synchronization, the limit
    ddp                  PyTorch's DistributedDataParallel, as it comes
    ddp fp16             DDP with torch's own hooks: fp16_compress_hook, powerSGD_hook
    hook topk:0.01       DDP with a small hook made of our kernels: fp16, int8, topk
    syncline topk:0.01   Sync with a codec

A bucket size that is not the default is the size of all buckets; at the default of 25 MB the first bucket has 1 MB.
That is DDP's rule, and here it is the rule for all. Every contender has the memory kept that gradients leave (see
`syncline.reducer.heap`), as Sync has it by itself: otherwise others would have page faults that ours has not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.bench.hooks import hook_factory
from syncline.codecs.registry import codec_of
from syncline.errors import UnknownName
from syncline.fabric.base import Fabric
from syncline.sync import Sync
from syncline.units import MIB

DEFAULT_BUCKET_BYTES = 25 * MIB
ONE_BUCKET_BYTES = 1000 * MIB  # of all gradients together
EXAMPLES = ("alone", "ddp", "ddp fp16", "ddp powersgd", "hook fp16", "hook topk:0.01", "hook int8", "syncline none")


@dataclass(frozen=True)
class Attached:
    """A model whose replicas are kept in step."""

    module: nn.Module  # whose forward is called
    message_bytes: Callable[[], float]  # that a rank gives to collectives in a step
    sync: Sync | None = None
    close: Callable[[], None] = lambda: None


Attach = Callable[[nn.Module, Optimizer, Fabric], Attached]


@dataclass(frozen=True)
class Contender:
    """One way to keep replicas in step, by its name, with a bucket size."""

    name: str
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of Sync, besides the codec and buckets

    def __post_init__(self) -> None:
        kind, _, what = self.name.partition(" ")
        if kind == "syncline" and what:
            codec_of(what)
        elif kind == "hook" and what:
            hook_factory(what)
        elif self.name not in EXAMPLES:
            raise UnknownName("method", self.name, EXAMPLES)

    @property
    def has_buckets(self) -> bool:
        """Whether the bucket size makes a difference that can be measured.

        Over Gloo torch's PowerSGD hook has all gradients in one bucket: it makes several calls for each, whose order
        with two buckets is not the same on all ranks, and then the ranks die.
        """
        return self.name not in ("alone", "ddp powersgd")

    def __call__(self, model: nn.Module, optimizer: Optimizer, fabric: Fabric) -> Attached:
        """Keep this model in step with those of the other ranks."""
        kind, _, what = self.name.partition(" ")
        if kind == "alone":
            return Attached(model, lambda: 0.0)
        if kind == "syncline":
            return attach_sync(model, optimizer, fabric, codec=what, **self.sync_buckets(), **self.settings)
        return self.attach_ddp(model, what if kind == "ddp" else "", hook_factory(what) if kind == "hook" else None)

    def sync_buckets(self) -> dict[str, int]:
        """Settings of Sync: with a size of its own, the first bucket is as large as the others."""
        first = MIB if self.bucket_bytes == DEFAULT_BUCKET_BYTES else self.bucket_bytes
        return {"bucket_bytes": self.bucket_bytes, "first_bucket_bytes": first}

    def attach_ddp(self, model: nn.Module, theirs: str, make_hook: Callable[[], Any] | None) -> Attached:
        """DDP over the process group, with one of torch's hooks, a small hook, or none."""
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        size = ONE_BUCKET_BYTES if theirs == "powersgd" else self.bucket_bytes
        cap = None if size == DEFAULT_BUCKET_BYTES else size / MIB
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
        if make_hook is not None:
            hook = make_hook()
            ddp.register_comm_hook(hook, lambda state, bucket: state(bucket))
            return Attached(ddp, lambda: sum(hook.sent.values()), close=hook.close)
        if theirs == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            return Attached(ddp, lambda: nbytes / state.compression_stats()[0])  # type: ignore[no-untyped-call]
        if theirs == "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return Attached(ddp, lambda: nbytes / 2 if theirs else nbytes)


def attach_sync(model: nn.Module, optimizer: Optimizer, fabric: Fabric, **settings: Any) -> Attached:
    """Sync, with these settings."""
    sync = Sync(model, optimizer, fabric=fabric, **settings)
    return Attached(model, lambda: sync.report().sent_bytes, sync, sync.close)
