"""Small communication hooks for DDP, made of our kernels: what a user could write in an afternoon.

They are the baseline that a library must beat. DDP's own reducer calls `start` for every full bucket, in the same order
on all ranks; gradients are encoded there, and decoded where the collective ends. The first pass goes uncompressed,
because DDP builds its buckets anew after it, and residuals belong to buckets.
"""

from __future__ import annotations

import concurrent.futures
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from syncline.codecs import kernels
from syncline.errors import UnknownName


class SmallHook(ABC):
    """A communication hook with one residual a bucket."""

    def __init__(self) -> None:
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.passes = 0
        self.residuals: dict[int, Tensor] = {}
        self.sent: dict[int, int] = defaultdict(int)  # bytes of a pass, by bucket

    def __call__(self, bucket: Any) -> Future[Tensor]:
        """Start the mean of a `dist.GradBucket`."""
        is_first_pass = self.passes == 0
        self.passes += bucket.is_last()
        if is_first_pass:
            return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
        return self.start(bucket.index(), bucket.buffer())

    @abstractmethod
    def start(self, index: int, values: Tensor) -> Future[Tensor]:
        """Start the mean of the values of one bucket, which is written over them."""

    def add_to_residual(self, index: int, values: Tensor, numel: int) -> Tensor:
        """The residual of a bucket with its gradients added, padded with zeros to `numel`."""
        if index not in self.residuals:
            self.residuals[index] = torch.zeros(numel)
        self.residuals[index][: len(values)].add_(values)
        return self.residuals[index]

    def close(self) -> None:
        """End what the hook has started."""


class Fp16Hook(SmallHook):
    """Half precision: one all-reduce a bucket, summed in half precision by Gloo, no residual."""

    def start(self, index: int, values: Tensor) -> Future[Tensor]:
        halves = kernels.narrow(values.div_(self.world), torch.float16)
        self.sent[index] = halves.nbytes

        def decode(_: Future[list[Tensor]]) -> Tensor:
            kernels.widen(values, halves)
            return values

        return future_of(dist.all_reduce(halves, async_op=True)).then(decode)


class TopKHook(SmallHook):
    """The largest entries of gradient and residual: one all-gather a bucket, of messages of one length."""

    def __init__(self, keep: float = 0.01) -> None:
        super().__init__()
        self.keep = keep

    def start(self, index: int, values: Tensor) -> Future[Tensor]:
        numel = len(values)
        count = max(1, round(self.keep * numel))
        residual = self.add_to_residual(index, values, numel)
        message = kernels.take_entries(residual, kernels.select_largest(residual, count), "fp32")
        room = torch.empty(most_bytes(count, numel), dtype=torch.uint8)
        room[: len(message)] = message
        self.sent[index] = len(room)
        gathered = torch.empty(self.world, len(room), dtype=torch.uint8)

        def decode(_: Future[list[Tensor]]) -> Tensor:
            lengths = (16 + gathered[:, 8:16].clone().view(torch.int64) + 4 * count).flatten().tolist()
            messages = [one[:length] for one, length in zip(gathered, lengths, strict=True)]
            kernels.mean_of_entries(values, messages, "fp32")
            return values

        return future_of(dist.all_gather([*gathered], room, async_op=True)).then(decode)


def most_bytes(count: int, numel: int) -> int:
    """A bound on a message of `count` entries: a head, positions as Rice codes or bits, values."""
    lower = int(math.log2(max(math.log(2) * numel / count, 1.0)))
    rice = -(-(count + (numel >> lower)) // 8) + -(-count * lower // 8)
    return 24 + min(rice, -(-numel // 8)) + 4 * count


class Int8Hook(SmallHook):
    """Integers of 8 bits with block scales: an all-to-all of slices and an all-gather of their means a bucket.

    The second collective of a bucket begins when the first has ended, which is at another time on every rank. So that
    all ranks begin them in the same order, one thread does it, on a process group of its own.
    """

    block = 256

    def __init__(self) -> None:
        super().__init__()
        self.group = dist.new_group()
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "int8 hook")

    def start(self, index: int, values: Tensor) -> Future[Tensor]:
        numel = -(-len(values) // (self.world * self.block)) * self.block  # of a slice
        slices = self.add_to_residual(index, values, self.world * numel).view(self.world, numel)
        parts = torch.empty(self.world, numel // self.block * 4 + numel, dtype=torch.uint8)
        for owner in range(self.world):
            if owner != self.rank:
                parts[owner] = kernels.take_quantized(slices[owner], self.block, 8, None)
        self.sent[index] = parts.nbytes
        exchanged, means, done = torch.empty_like(parts), torch.empty_like(parts), Future[Tensor]()
        exchange = dist.all_to_all_single(exchanged, parts, async_op=True)

        block = self.block

        def decode(_: Future[list[Tensor]]) -> None:  # holds no group: its last holder must not be one of its threads
            for message, out in zip(means, torch.split(values, numel), strict=False):
                whole = out if len(out) == numel else torch.empty(numel)
                kernels.dequantize(message, whole, block, 8)
                if whole is not out:
                    out.copy_(whole[: len(out)])
            done.set_result(values)

        def gather() -> None:
            exchange.wait()
            own = slices[self.rank]
            for rank in range(self.world):
                if rank != self.rank:
                    kernels.dequantize(exchanged[rank], own, self.block, 8, "add")
            mean = kernels.take_quantized(own.div_(self.world), self.block, 8, None)
            own.mul_(self.world)  # what this rounding lost is lost for all ranks, so it is kept for all
            future_of(dist.all_gather([*means], mean, group=self.group, async_op=True)).then(decode)

        def end(gathering: concurrent.futures.Future[None]) -> None:
            if error := gathering.exception():
                done.set_exception(error)  # type: ignore[arg-type]

        self.thread.submit(gather).add_done_callback(end)
        return done

    def close(self) -> None:
        self.thread.shutdown()
        dist.destroy_process_group(self.group)


def future_of(work: dist.Work | None) -> Future[list[Tensor]]:
    """The future of a collective that was just started."""
    assert work is not None
    return work.get_future()


HOOKS: dict[str, Callable[..., SmallHook]] = {"fp16": Fp16Hook, "topk": TopKHook, "int8": Int8Hook}


def hook_factory(text: str) -> Callable[[], SmallHook]:
    """What makes the hook that `fp16`, `int8` or `topk:0.01` names, once there is a process group."""
    name, _, keep = text.partition(":")
    try:
        fraction = float(keep or 0.01)
    except ValueError:
        fraction = 0.0
    if name not in HOOKS or (keep and name != "topk") or not 0 < fraction <= 1:
        raise UnknownName("small hook", text, ["fp16", "topk:0.01", "int8"])
    return (lambda: TopKHook(fraction)) if name == "topk" else HOOKS[name]
