"""Batch normalization over the batches of all ranks, on any fabric and device.

    model = syncline.convert_batch_norm(model)      # before the optimizer is made
    sync = syncline.Sync(model, optimizer)

It is the counterpart of `torch.nn.SyncBatchNorm`, which works on GPUs alone. Wire: in forward every rank's mean, spread
and count (two numbers a channel and one), in backward two numbers a channel.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncline.core.torch_internals import AnyBatchNorm
from syncline.current import resolve
from syncline.errors import ConfigError
from syncline.fabric.base import Fabric
from syncline.guards.trainable import refuse_lazy


class Connection:
    """Of a layer to the other ranks. Copies of the layer share it; a layer that comes from a file has none."""

    def __init__(self, fabric: Fabric | None = None) -> None:
        self.fabric = fabric

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Connection], tuple[()]]:
        return Connection, ()


class SyncBatchNorm(AnyBatchNorm):
    """Normalizes with the mean and variance of the batches of all ranks, which may differ in size."""

    connection: Connection

    @classmethod
    def of(cls, other: AnyBatchNorm, fabric: Fabric) -> Self:
        """The same layer, with the same parameters and statistics."""
        made = cls(other.num_features, other.eps, other.momentum, other.affine, other.track_running_stats)
        made.weight, made.bias = other.weight, other.bias
        made.running_mean, made.running_var = other.running_mean, other.running_var
        made.num_batches_tracked = other.num_batches_tracked
        made.training = other.training
        made.connection = Connection(fabric)
        return made

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected a batch with channels, not {input.dim()} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        """(batch, channels, ...) to the same."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not self.training:
            return self._alone(input, uses_batch)
        fabric = self.connection.fabric
        if fabric is None:
            raise ConfigError("this batch normalization comes from a file; train with convert_batch_norm(model)")
        if fabric.world == 1:
            return self._alone(input, uses_batch)
        mean, variance, count = statistics_of_all(input, fabric)
        if count == 1:
            raise ConfigError(
                f"the batches of all {fabric.world} ranks have one value for each channel together, which is its own "
                f"mean; give at least one rank a larger batch, or leave out this one on all ranks"
            )
        self._track(mean, variance, count)
        normalized: Tensor = Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, (variance + self.eps).rsqrt(), count, fabric
        )
        return normalized

    def _alone(self, input: Tensor, uses_batch: bool) -> Tensor:
        """With stored statistics, or of this rank's batch."""
        share = self._count_batch() if self.training else 0.0
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, uses_batch, share, self.eps
        )

    def _count_batch(self) -> float:
        """How far the running statistics move; without momentum they are means over all batches."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0

    def _track(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Move the running statistics; the stored variance is the unbiased one. An empty batch only counts."""
        if self.running_mean is None or self.running_var is None:
            return
        share = self._count_batch()
        if not count:
            return
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * (count / max(count - 1, 1))).to(self.running_var.dtype), share)


class Normalize(torch.autograd.Function):
    """(x - mean) / deviation * weight + bias, where mean and deviation depend on x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        count: float,
        fabric: Fabric,
    ) -> Tensor:
        """`inverse` is that of the deviation."""
        standard = (x - along(mean, x)) * along(inverse, x)
        ctx.save_for_backward(standard, weight, inverse)
        ctx.count, ctx.fabric = count, fabric
        scaled = standard if weight is None else standard * along(weight, x)
        return (scaled if bias is None else scaled + along(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x needs two sums over all ranks; those of weight and bias are this rank's own."""
        standard, weight, inverse = ctx.saved_tensors
        others = [dimension for dimension in range(gradient.dim()) if dimension != 1]
        plain = gradient.to(standard.dtype)
        local = torch.stack([plain.sum(others), (plain * standard).sum(others)])
        total = ctx.fabric.all_reduce(local.clone()) / max(ctx.count, 1)
        centred = plain - along(total[0], plain) - standard * along(total[1], plain)
        factor = inverse if weight is None else inverse * weight
        of_weight = None if weight is None else local[1].to(weight.dtype)
        of_bias = None if weight is None else local[0].to(weight.dtype)
        return (centred * along(factor, plain)).to(gradient.dtype), of_weight, of_bias, None, None, None, None


def statistics_of_all(x: Tensor, fabric: Fabric) -> tuple[Tensor, Tensor, float]:
    """Mean, biased variance and count over the batches of all ranks, without subtracting large numbers.

    Of batches that are all empty these are zeros.
    """
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    others = [dimension for dimension in range(x.dim()) if dimension != 1]
    count = x.numel() // x.shape[1]
    channels = x.shape[1]
    mean = wide.mean(others) if count else wide.new_zeros(channels)
    spread = wide.var(others, correction=0) * count if count else wide.new_zeros(channels)
    gathered = fabric.all_gather(torch.cat([mean, spread, mean.new_tensor([float(count)])]))
    means, spreads, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
    total = float(counts.sum())
    mean = (means * counts).sum(0) / max(total, 1)
    variance = (spreads + counts * (means - mean).square()).sum(0) / max(total, 1)
    return mean, variance, total


def along(per_channel: Tensor, x: Tensor) -> Tensor:
    """One value a channel in a shape that broadcasts over `x`."""
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))


def refuse_shared_statistics(model: nn.Module) -> None:
    """A rank that has no more data cannot keep the others company in their forward passes."""
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
            raise ConfigError(
                f"{name} normalizes over the batches of all ranks, so none can do without the others, and join() is "
                f"not possible; give all ranks as many batches, or use plain batch normalization (buffers='average')"
            )


def convert_batch_norm(model: nn.Module, fabric: Fabric | str = "auto") -> nn.Module:
    """The model with every batch normalization made one over all ranks. All ranks convert the same model."""
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm):
            refuse_lazy(module, name)
    return replaced(model, resolve(fabric).subgroup())


def replaced(module: nn.Module, fabric: Fabric) -> nn.Module:
    """This module and all in it."""
    if isinstance(module, AnyBatchNorm):
        return SyncBatchNorm.of(module, fabric)
    for name, child in module.named_children():
        setattr(module, name, replaced(child, fabric))
    return module
