"""Who trains: a rank with a `Sync`, a rank with DDP, or one process that has the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import syncline
from support.batches import Batch, fill

if TYPE_CHECKING:
    from support.scenarios import Scenario

SMALL_BUCKETS = {"first_bucket_bytes": 256, "bucket_bytes": 1024}
DEADLINES = syncline.Deadlines(20.0, join=60.0)


class Run:
    """A model in training: what loops are written with."""

    def __init__(self, scenario: Scenario, ranks: Sequence[int], world: int, seed: int) -> None:
        self.scenario = scenario
        self.ranks = ranks  # whose batches these are
        self.world = world
        self.model = fill(scenario.model(), seed)
        self.callable: nn.Module = self.model  # what is called in forward
        self.optimizers = scenario.optimizers(self.model)
        self.scaler = scenario.scaler() if scenario.scaler is not None else None
        self.noted: list[Any] = []  # what must be equal on all ranks, and in one process

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0]

    @property
    def mode(self) -> str:
        return str(self.scenario.settings.get("mode", "sync"))

    @property
    def is_in_step(self) -> bool:
        """Whether ranks have as many backward passes as the others, so that they can talk in between."""
        return self.mode.partition(":")[0] not in ("local", "slowmo", "diloco")

    def loss(self, step: int, of: Callable[[nn.Module, Batch], Tensor] | None = None) -> Tensor:
        """The mean over the batches of a step."""
        losses = [(of or self.scenario.loss)(self.callable, Batch(rank, step)) for rank in self.ranks]
        return sum(losses[1:], losses[0]) / len(losses)

    def backward(self, step: int, of: Callable[[nn.Module, Batch], Tensor] | None = None) -> None:
        self.backward_of(self.loss(step, of))

    def backward_of(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def let_learn(self, module: nn.Module, wanted: bool) -> None:
        """Unfreeze parameters, or freeze them."""
        module.requires_grad_(wanted)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def more_to_come(self) -> AbstractContextManager[None]:
        """Around a backward pass that is not the last one before a step, for those who cannot know."""
        return nullcontext()

    def wait(self) -> None:
        """Until gradients are means."""

    def drain(self) -> None:
        """Until all that is under way is used."""

    def loaded(self) -> None:
        """All ranks have loaded the same weights."""

    def mean(self, loss: Tensor) -> Tensor:
        return loss.detach()

    def note(self, model: nn.Module) -> None:
        """Parameters, rounded, that must be those of one process."""
        self.noted += [[round(value, 8) for value in p.detach().flatten().tolist()] for p in model.parameters()]

    def note_absent_gradients(self) -> None:
        self.noted.append([name for name, p in clean(self.model.named_parameters()) if p.grad is None])

    def result(self) -> Result:
        return Result(
            {name: p.detach().clone() for name, p in clean(self.model.named_parameters())},
            {name: b.detach().clone() for name, b in clean(self.model.named_buffers())},
            [tensor.clone() for optimizer in self.optimizers for tensor in state_of(optimizer)],
            self.noted,
        )


def put_around_step(optimizer: Optimizer, around: Callable) -> None:
    """Have something called with the optimizer's step instead of it."""
    inner = optimizer.step

    def step(one: Optimizer, *arguments: object) -> object:
        return around(inner, one, *arguments)

    optimizer.step = MethodType(step, optimizer)


class SyncRun(Run):
    """One rank with `Sync`."""

    def __init__(self, scenario: Scenario, fabric: syncline.Fabric) -> None:
        super().__init__(scenario, [fabric.rank], fabric.world, seed=fabric.rank)
        self.fabric = fabric
        self.syncs = self.attach({**SMALL_BUCKETS, **scenario.settings})

    def attach(self, settings: dict[str, Any]) -> list[syncline.Sync]:
        """A `Sync` for the model, or for each of its parts with its optimizer, or the one that they share."""
        if not self.scenario.parts:
            self.callable, watched = self.scenario.compile(self.model)
            given = self.optimizer if len(self.optimizers) == 1 else self.optimizers
            return [syncline.Sync(watched, given, fabric=self.fabric, scaler=self.scaler, **settings)]
        optimizers = self.optimizers * (len(self.scenario.parts) // len(self.optimizers))
        parts = zip(self.scenario.parts, optimizers, strict=True)
        return [
            syncline.Sync(self.model.get_submodule(name), one, fabric=self.fabric, **settings) for name, one in parts
        ]

    @property
    def sync(self) -> syncline.Sync:
        return self.syncs[0]

    @property
    def trains_alone(self) -> bool:
        """Whether the other ranks are servers."""
        return "apart=true" in self.mode

    def no_sync(self) -> AbstractContextManager[None]:
        stack = ExitStack()
        for sync in self.syncs:
            stack.enter_context(sync.no_sync())
        return stack

    def wait(self) -> None:
        for sync in self.syncs:
            sync.wait()

    def drain(self) -> None:
        for sync in self.syncs:
            sync.drain()

    def serves(self) -> bool:
        """Whether this rank is a server and nothing else, until all workers have left."""
        return all(sync.serve() for sync in self.syncs)

    def mean(self, loss: Tensor) -> Tensor:
        if self.trains_alone:
            return loss.detach()
        return self.fabric.all_reduce(loss.detach().clone(), op="mean", collective="direct")


class DdpRun(Run):
    """One rank with PyTorch's DistributedDataParallel."""

    def __init__(self, scenario: Scenario, fabric: syncline.Fabric) -> None:
        super().__init__(scenario, [fabric.rank], fabric.world, seed=fabric.rank)
        for name in scenario.parts:
            setattr(self.model, name, self.wrapped(self.model.get_submodule(name)))
        if not scenario.parts:
            self.callable = self.wrapped(scenario.compile(self.model)[0])
        self.fabric = fabric

    def wrapped(self, module: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(module, **self.scenario.ddp or {})

    def let_learn(self, module: nn.Module, wanted: bool) -> None:
        """What DDP synchronizes is settled when it is made: whoever changes that makes it anew, and keeps the rest."""
        before = [parameter.requires_grad for parameter in self.model.parameters()]
        super().let_learn(module, wanted)
        if before != [parameter.requires_grad for parameter in self.model.parameters()]:
            self.callable = self.wrapped(self.model)

    def mean(self, loss: Tensor) -> Tensor:
        return self.fabric.all_reduce(loss.detach().clone(), op="mean")

    def no_sync(self) -> AbstractContextManager[None]:
        return self.callable.no_sync()


@dataclass
class Result:
    """What is left after training."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: list[Tensor]  # of optimizers
    noted: list[Any]

    def tensors(self, buffers: bool = True) -> list[Tensor]:
        return [*self.parameters.values(), *(self.buffers.values() if buffers else ()), *self.state]


def clean(named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Without the names that DDP puts in."""
    return ((name.replace("module.", ""), tensor) for name, tensor in named)


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """Tensors of an optimizer's state in the order of its parameters."""
    states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    return [state[key] for state in states for key in sorted(state) if isinstance(state[key], Tensor)]
