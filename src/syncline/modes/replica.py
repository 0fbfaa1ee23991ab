"""One rank's replica: the model, its optimizers, and the ways to make it equal to the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.codecs.codec import Codec
from syncline.core.torch_internals import has_buffers
from syncline.fabric.base import Fabric
from syncline.guards.divergence import compare_replicas
from syncline.guards.fingerprint import ReplicaGuard
from syncline.guards.hyperparameters import compare_hyperparameters, describe, describe_optimizers
from syncline.modes.buffers import SettledBuffers
from syncline.modes.settings import Settings
from syncline.path.codec_state import Saved
from syncline.path.coded import CodedPath
from syncline.path.flushing import Dense, FlushingPath
from syncline.path.make import make_path
from syncline.path.path import Path
from syncline.path.residuals import GradientScale
from syncline.reducer.parameters import Named, describe_layout, parameters_of
from syncline.replicas import (
    broadcast_optimizers,
    broadcast_scaler,
    broadcast_tensors,
    compare_rates,
    is_sharded,
    model_tensors,
    optimizer_values,
)
from syncline.tracing.spans import Recorder


@dataclass
class Replica:
    """What a mode works on."""

    model: nn.Module
    optimizers: list[Optimizer]
    scaler: torch.amp.GradScaler | None
    settings: Settings
    fabric: Fabric
    collective: str
    recorder: Recorder = field(default_factory=Recorder)
    settled_buffers: SettledBuffers = field(init=False, default_factory=SettledBuffers)  # between the ranks of `fabric`
    shards_state: bool = field(init=False, default=False)  # ranks were seen to keep different parts of optimizer state
    names: dict[Tensor, str] = field(init=False)  # of parameters: to walk through the model in every pass takes long

    def __post_init__(self) -> None:
        self.names = {parameter: name for name, parameter in self.named()}

    def named(self) -> Named:
        """Its parameters."""
        return parameters_of(self.model)

    def layout(self) -> list[str]:
        """What ranks must have in common in their models and settings."""
        return describe_layout(self.named(), self.model.named_buffers(), [f"settings {self.settings}"])

    def common(self) -> list[str]:
        """What ranks must have in common when they start."""
        if not self.settings.divergence_guard:
            return self.layout()
        names = {id(parameter): name for name, parameter in self.named()}
        scaled = f"GradScaler: {'no' if self.scaler is None else 'yes'}"
        return [*self.layout(), scaled, *describe_optimizers(self.optimizers, names)]

    def unserved(self) -> list[Tensor]:
        """What no optimizer changes: frozen parameters, and buffers."""
        return [*(p for _, p in self.named() if not p.requires_grad), *self.model.buffers()]

    def path(self, fabric: Fabric, scale: GradientScale | None = None, codec: Codec | None = None) -> Path:
        """A path for buckets; residuals follow learning rates, unless a scale is given."""
        chosen = codec or self.settings.codec
        find_scale = self.scale if scale is None else lambda: scale
        lean = self.settings.lean
        return make_path(fabric, self.collective, self.recorder, chosen, self.settings.seed, find_scale, lean)

    def flushing(self, then: Path) -> Path:
        """A path that sends residuals densely first, for a codec that has none."""
        flush = self.path(then.fabric, codec=Dense())
        assert isinstance(flush, CodedPath)
        return FlushingPath(flush, then)

    @torch.no_grad()
    def apply_residuals(self, saved: Saved) -> None:
        """Move parameters by the mean of what ranks have not sent, as a step of plain SGD would have moved them."""
        residuals, scales = saved.get("residual", {}), saved.get("step_scale", {})
        for name, parameter in self.named():
            if name in residuals:
                displacement = residuals[name].flatten() * scales.get(name, 0.0)
                self.fabric.all_reduce(displacement, "mean")
                parameter.sub_(displacement.view(parameter.shape))

    def learning_rates(self) -> dict[str, float]:
        """Of every parameter that is in an optimizer."""
        groups = [(float(group["lr"]), group["params"]) for one in self.optimizers for group in one.param_groups]
        return {self.names[p]: rate for rate, parameters in groups for p in parameters if p in self.names}

    def scale(self) -> GradientScale:
        """What gradients are worth now."""
        return GradientScale(self.learning_rates(), self.scaler.get_scale() if self.scaler is not None else 1.0)

    def step_optimizers(self) -> None:
        """As the user does it."""
        with torch.inference_mode(False):
            for optimizer in self.optimizers:
                optimizer.step()

    def settle_buffers(self, root: int) -> None:
        """Make the buffers of modules equal, if that is wanted."""
        if not has_buffers(self.model):
            return
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if buffer.numel()}
        self.settled_buffers.settle(self.fabric, self.settings.buffers, buffers, root)

    def take_state_of(self, root: int) -> None:
        """Give everyone what one rank has, but for learning rates."""
        broadcast_tensors(self.fabric, model_tensors(self.model), root)
        broadcast_optimizers(self.fabric, self.optimizers, root)
        if self.scaler is not None:
            broadcast_scaler(self.fabric, self.scaler, root)
        compare_rates(self.fabric, self.optimizers)

    def guard(self) -> ReplicaGuard | None:
        """What makes fingerprints of this replica, if they are wanted and there is anybody to compare with."""
        if not self.settings.divergence_guard or self.fabric.world == 1:
            return None
        return ReplicaGuard(
            self.model,
            self.named(),
            self.optimizers,
            lambda: [tensor for _, tensor in self.compared_state()],
            self.scaler,
            self.recorder,
        )

    def compare(self, when: str, optimizers: bool = True, touched: bool = False) -> None:
        """Raise unless all replicas have the same bits; `touched` if this one was changed outside its step."""
        self.compare_hyperparameters(when, scale=optimizers)
        named: list[tuple[str, Tensor]] = [*self.named()]
        state = self.compared_state() if optimizers else []
        state += [(name, torch.tensor(count)) for name, count in self.compared_state(int)] if optimizers else []
        self.shards_state = compare_replicas(self.fabric, named, state, when, touched) or self.shards_state

    def compare_hyperparameters(self, when: str, scale: bool = True) -> None:
        """Raise unless all ranks have the same hyperparameters, and the same `scale` of the loss."""
        if not self.settings.divergence_guard:
            return
        found = describe(self.optimizers)
        if scale and self.scaler is not None:
            found["the scale of the GradScaler"] = repr(self.scaler.get_scale())
        compare_hyperparameters(self.fabric, found, when)

    def compared_state(self, kind: type = Tensor) -> list[tuple[str, Any]]:
        """What optimizers keep of the parameters of this model, by name, where every rank has all of it.

        Of other `kind`s than tensors only whole numbers are alike on all ranks: fractions may be a rank's own loss.
        """
        if self.shards_state:
            return []
        names = {id(parameter): name for name, parameter in self.named()}
        whole = [optimizer for optimizer in self.optimizers if not is_sharded(optimizer)]
        everything = [p for optimizer in whole for group in optimizer.param_groups for p in group["params"]]
        found = [(id(everything[position]), what, value) for position, what, value in optimizer_values(whole, kind)]
        return [(f"optimizer state {what} of {names[of]}", value) for of, what, value in found if of in names]
