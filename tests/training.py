"""Training on ranks, in one process on the whole batch, and with DDP: one loop, three times. Light: ranks import it.

A `Scenario` is a model, optimizers and a loop as a user would write it. The loop is given a `Run`, which knows who is
training: a rank with a `Sync`, a rank with DDP, or one process that has the batches of all ranks.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import syncline
from syncline.errors import Desync, LateGradient, PeerError

STEPS = 5
ROWS, INPUTS, HIDDEN, OUTPUTS, WORDS = 4, 6, 12, 3, 11
SMALL_BUCKETS = {"first_bucket_bytes": 256, "bucket_bytes": 1024}
DEADLINES = syncline.Deadlines(20.0, join=60.0)


# Data and weights, the same in every process whoever draws them


def generator_of(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(number * 1009**place for place, number in enumerate(numbers)))


@dataclass(frozen=True)
class Batch:
    """What one rank has for one step."""

    rank: int
    step: int

    @cached_property
    def x(self) -> Tensor:
        return torch.randn(ROWS, INPUTS, generator=generator_of(self.rank, self.step, 1), dtype=torch.float64)

    @cached_property
    def y(self) -> Tensor:
        return torch.randn(ROWS, OUTPUTS, generator=generator_of(self.rank, self.step, 2), dtype=torch.float64)

    @cached_property
    def words(self) -> Tensor:
        """More of them on higher ranks."""
        shape = (ROWS, 1 + self.rank)
        return torch.randint(WORDS, shape, generator=generator_of(self.rank, self.step, 3))

    @cached_property
    def image(self) -> Tensor:
        return torch.randn(ROWS, 3, 5, 5, generator=generator_of(self.rank, self.step, 4), dtype=torch.float64)


def fill(model: nn.Module, seed: int) -> nn.Module:
    """Weights from a generator of their own, because ranks that are threads share the global one."""
    generator = generator_of(seed, 77)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn / math.sqrt(max(parameter[:1].numel() if parameter.dim() else 1, 4)))
    return model


# Models


def mlp(dtype: torch.dtype = torch.float64, layers: int = 3, width: int = HIDDEN) -> nn.Sequential:
    """Several layers, of which each has a bucket of its own when buckets are small."""
    sizes = [INPUTS, *[width] * (layers - 1), OUTPUTS]
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        modules += [nn.Linear(inputs, outputs, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*modules[:-1])


def frozen_below() -> nn.Sequential:
    """Only the last layer learns, until somebody changes that."""
    model = mlp()
    model[:4].requires_grad_(False)
    return model


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = mlp(torch.float32)
        self.brain = mlp(torch.bfloat16)
        self.wide = mlp(torch.float64)
        self.gain = nn.Parameter(torch.ones(OUTPUTS, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (self.single(x.float()).double() + self.brain(x.bfloat16()).double() + self.wide(x))


class Tied(nn.Module):
    """The same matrix turns words into vectors and vectors into words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN, dtype=torch.float64)
        self.body = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.scores = nn.Linear(HIDDEN, WORDS, dtype=torch.float64)
        self.scores.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.scores(self.body(self.words(words)).tanh())


class Branches(nn.Module):
    """Parts that are used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.always = mlp()
        self.sometimes = mlp()
        self.here_and_there = mlp()
        self.never = mlp()

    def forward(self, x: Tensor, names: Sequence[str]) -> Tensor:
        return sum((self.get_submodule(name)(x) for name in names), torch.zeros((), dtype=x.dtype))


class Words(nn.Module):
    """Sparse gradients beside dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN, sparse=True, dtype=torch.float64)
        self.bag = nn.EmbeddingBag(WORDS, HIDDEN, sparse=True, mode="sum", dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, OUTPUTS, dtype=torch.float64)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words).mean(dim=1).tanh() + self.bag(words))


class OddLayouts(nn.Module):
    """Parameters that are not laid out row by row: transposed, permuted, and with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.zeros(HIDDEN, INPUTS, dtype=torch.float64).t())
        self.with_gaps = nn.Parameter(torch.zeros(HIDDEN, 2 * HIDDEN, dtype=torch.float64)[:, ::2])
        self.permuted = nn.Parameter(torch.zeros(2, OUTPUTS, HIDDEN, dtype=torch.float64).permute(2, 0, 1))
        self.single = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = ((x @ self.transposed).tanh() @ self.with_gaps).tanh()
        return torch.einsum("rh,hko->ro", hidden, self.permuted) + self.single + self.empty.sum()


def convolutions() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, dtype=torch.float64),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, dtype=torch.float64),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, OUTPUTS, dtype=torch.float64),
    )
    return model.to(memory_format=torch.channels_last)


def normalized() -> nn.Module:
    """The first layer sees the data, so that its statistics have a closed form."""
    return nn.Sequential(
        nn.BatchNorm1d(INPUTS, dtype=torch.float64),
        nn.Linear(INPUTS, HIDDEN, dtype=torch.float64),
        nn.Tanh(),
        nn.BatchNorm1d(HIDDEN, dtype=torch.float64),
        nn.Linear(HIDDEN, OUTPUTS, dtype=torch.float64),
    )


class Checkpointed(nn.Module):
    """Every parameter is in a segment that is computed again in the backward pass; `shared` is in two of them."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = mlp(layers=2)
        self.shared = nn.Linear(OUTPUTS, OUTPUTS, dtype=torch.float64)
        self.second = nn.Linear(OUTPUTS, OUTPUTS, dtype=torch.float64)
        self.third = nn.Linear(OUTPUTS, OUTPUTS, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for segment in (self.first, *self.segments()):
            x = checkpoint(segment, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return x

    def segments(self) -> list[Callable[[Tensor], Tensor]]:
        return [
            lambda x: self.second(self.shared(x).tanh()),
            lambda x: self.third(x).tanh(),
            lambda x: self.shared(x).tanh(),
        ]


class Pair(nn.Module):
    """Two models in one loop."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(mlp(), nn.Linear(OUTPUTS, OUTPUTS, dtype=torch.float64))
        self.critic = nn.Sequential(nn.Linear(OUTPUTS, HIDDEN, dtype=torch.float64), nn.Tanh())
        self.critic.append(nn.Linear(HIDDEN, 1, dtype=torch.float64))


class MoreAndMore(nn.Module):
    """A layer that is used in one segment, and in a later step in two; gradients come from the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.often = nn.Linear(INPUTS, INPUTS, dtype=torch.float64)
        self.middle = nn.Linear(INPUTS, INPUTS, dtype=torch.float64)
        self.last = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)

    def forward(self, x: Tensor, segments: int) -> Tensor:
        again = partial(checkpoint, use_reentrant=True, preserve_rng_state=False)
        x = x.clone().requires_grad_()
        if segments > 1:
            x = again(self.often, x).tanh()
        return self.last(again(self.often, again(self.middle, x).tanh()).tanh())


class UsedBackwards(nn.Module):
    """Layers that are used in another order than that of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(HIDDEN, OUTPUTS, dtype=torch.float64)
        self.middle = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.first = nn.Linear(INPUTS, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


class Boom(Exception):
    """What a trap raises."""


class Trap(torch.autograd.Function):
    """Passes everything on, and raises in the backward pass if it is armed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: bool) -> Tensor:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.armed:
            raise Boom
        return gradient, None


class Trapped(nn.Module):
    """Three layers, and traps at the places that the backward pass comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([part for part in mlp(layers=3) if isinstance(part, nn.Linear)])

    def forward(self, x: Tensor, armed: str = "") -> Tensor:
        if armed == "in forward":
            raise Boom
        x = Trap.apply(x.requires_grad_(), armed == "after all gradients")
        x = Trap.apply(self.layers[0](x).tanh(), armed == "after most gradients")
        x = Trap.apply(self.layers[1](x).tanh(), armed == "between gradients")
        return Trap.apply(self.layers[2](x), armed == "before all gradients")


# Losses: what one batch says about a model


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x) - batch.y).square().mean()


def squared_in_single(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x.float()) - batch.y.float()).square().mean()


def squared_under_autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return squared_in_single(model, batch)


def squared_of_a_leaf(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x.clone().requires_grad_()) - batch.y).square().mean()


def squared_of_words(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.words) - batch.y).square().mean()


def squared_of_images(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.image.contiguous(memory_format=torch.channels_last)) - batch.y).square().mean()


def next_word(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch.words[:, 0]), batch.words[:, 0].roll(1))


def of_branches(model: nn.Module, batch: Batch) -> Tensor:
    names = ["always"]
    if batch.step % 2:
        names.append("sometimes")
    if batch.step > 1 and (batch.rank + batch.step) % 2:
        names.append("here_and_there")
    return (model(batch.x, names) - batch.y).square().mean()


def absent_on_a_rank(model: nn.Module, batch: Batch) -> Tensor:
    """In some steps, the first of them one, a rank has nothing to say about any parameter."""
    if (batch.rank, batch.step) in ((1, 0), (0, 2), (1, 3)):
        return torch.zeros((), dtype=torch.float64, requires_grad=True) * 1.0
    return squared(model, batch)


def with_gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that has a gradient in it."""
    x = batch.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return squared(model, batch) + slope.square().mean()


def infinite_once(model: nn.Module, batch: Batch) -> Tensor:
    """One batch of one rank is too much in one step."""
    return squared(model, batch) * (torch.inf if (batch.rank, batch.step) == (1, 2) else 1.0)


# Who trains


class Run:
    """A model in training: what loops are written with."""

    def __init__(self, scenario: Scenario, ranks: Sequence[int], world: int, seed: int) -> None:
        self.scenario = scenario
        self.ranks = ranks  # whose batches these are
        self.world = world
        self.model = fill(scenario.model(), seed)
        self.callable: nn.Module = self.model  # what is called in forward
        self.optimizers = scenario.optimizers(self.model)
        self.noted: list[Any] = []  # what must be equal on all ranks, and in one process

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0]

    def loss(self, step: int, of: Callable[[nn.Module, Batch], Tensor] | None = None) -> Tensor:
        """The mean over the batches of a step."""
        losses = [(of or self.scenario.loss)(self.callable, Batch(rank, step)) for rank in self.ranks]
        return sum(losses[1:], losses[0]) / len(losses)

    def backward(self, step: int) -> None:
        self.loss(step).backward()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> None:
        """Until gradients are means."""

    def mean(self, loss: Tensor) -> Tensor:
        return loss.detach()

    def note_absent_gradients(self) -> None:
        self.noted.append([name for name, p in self.model.named_parameters() if p.grad is None])

    def result(self) -> Result:
        return Result(
            {name: p.detach().clone() for name, p in clean(self.model.named_parameters())},
            {name: b.detach().clone() for name, b in clean(self.model.named_buffers())},
            [tensor.clone() for optimizer in self.optimizers for tensor in state_of(optimizer)],
            self.noted,
        )


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
            return [syncline.Sync(watched, given, fabric=self.fabric, **settings)]
        optimizers = self.optimizers * (len(self.scenario.parts) // len(self.optimizers))
        parts = zip(self.scenario.parts, optimizers, strict=True)
        return [
            syncline.Sync(self.model.get_submodule(name), one, fabric=self.fabric, **settings) for name, one in parts
        ]

    @property
    def sync(self) -> syncline.Sync:
        return self.syncs[0]

    def no_sync(self) -> AbstractContextManager[None]:
        stack = ExitStack()
        for sync in self.syncs:
            stack.enter_context(sync.no_sync())
        return stack

    def wait(self) -> None:
        for sync in self.syncs:
            sync.wait()

    def mean(self, loss: Tensor) -> Tensor:
        return self.fabric.all_reduce(loss.detach().clone(), op="mean", collective="direct")


class DdpRun(Run):
    """One rank with PyTorch's DistributedDataParallel."""

    def __init__(self, scenario: Scenario, fabric: syncline.Fabric) -> None:
        super().__init__(scenario, [fabric.rank], fabric.world, seed=fabric.rank)
        options = scenario.ddp or {}
        for name in scenario.parts:
            setattr(self.model, name, DistributedDataParallel(self.model.get_submodule(name), **options))
        if not scenario.parts:
            self.callable = DistributedDataParallel(self.model, **options)

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


# Loops


def plain(run: Run) -> None:
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        run.step()
        run.note_absent_gradients()


def zeroed_in_place(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(step)
        run.optimizer.step()


def zeroed_now_and_then(run: Run) -> None:
    """Gradients are kept over a step, dropped, and zeroed in place, by turns."""
    for step in range(6):
        if step % 3:
            run.optimizer.zero_grad(set_to_none=step % 3 == 1)
        run.backward(step)
        run.optimizer.step()


def several_backwards(run: Run) -> None:
    """Every step has another number of them, and nobody was told."""
    number = iter(range(100))
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        for _ in range(1 + step % 3):
            run.backward(next(number))
        run.optimizer.step()


def pairs_of_backwards(run: Run) -> None:
    """For `accumulate=2`."""
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        run.backward(2 * step)
        run.backward(2 * step + 1)
        run.optimizer.step()


def pairs_with_no_sync(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        with run.no_sync():
            run.backward(2 * step)
        run.backward(2 * step + 1)
        run.optimizer.step()


def no_sync_at_the_end(run: Run) -> None:
    """The last backward before a step, or the only one, is not synchronized; the step sees means all the same."""
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 3 == 0)
        if step % 2:
            run.backward(2 * step)
        with run.no_sync():
            run.backward(2 * step + 1)
        run.optimizer.step()


def clipped(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward(step)
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.noted.append(norm > 0.1)
        run.optimizer.step()


def clipped_after_no_sync(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(step)
        run.wait()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()


def clipped_after_waiting(run: Run) -> None:
    """`wait` sees to it that everybody clips means, whatever this rank had in its backward pass."""
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward(step)
        run.wait()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()


def scaled(run: Run) -> None:
    """With a GradScaler, which skips a step that is not finite and changes its scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS + 1):
        run.optimizer.zero_grad()
        scaler.scale(run.loss(step)).backward()
        scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        scaler.step(run.optimizer)
        scaler.update()
        run.noted.append(scaler.get_scale())


def scheduled(run: Run) -> None:
    scheduler = StepLR(run.optimizer, step_size=2, gamma=0.3)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward(step)
        run.optimizer.step()
        scheduler.step()
        run.noted.append(scheduler.get_last_lr())


def twice_through_the_graph(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        run.optimizer.step()


def unfrozen_later(run: Run) -> None:
    """The second layer learns from the third step on, the first from the fifth, and then the second no more."""
    first, second = run.model[0], run.model[2]
    for step in range(STEPS + 2):
        second.requires_grad_(2 <= step < 5)
        first.requires_grad_(step >= 4)
        run.optimizer.zero_grad()
        run.backward(step)
        run.optimizer.step()
        run.note_absent_gradients()


def swapped(run: Run) -> None:
    """From one step to the next all that learned is frozen, and what was frozen learns; gradients are clipped."""
    for step in range(STEPS):
        run.model[0].requires_grad_(step >= 2)
        run.model[2:].requires_grad_(step < 2)
        run.optimizer.zero_grad()
        run.backward(step)
        run.wait()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()


def noting_strides(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward(step)
        run.noted += [p.grad.stride() == p.stride() for p in run.model.parameters()]
        run.optimizer.step()


def adversaries(run: Run) -> None:
    """The critic learns, then the generator through the critic."""
    generator, critic = run.model.generator, run.model.critic
    for_generator, for_critic = run.optimizers

    def critics_loss(_: nn.Module, batch: Batch) -> Tensor:
        scores = critic(torch.cat([batch.y, generator(batch.x).detach()]))
        return (scores[:ROWS] - 1).square().mean() + scores[ROWS:].square().mean()

    for step in range(STEPS):
        for_critic.zero_grad()
        run.loss(step, critics_loss).backward()
        for_critic.step()
        for_generator.zero_grad()
        run.loss(step, lambda _, batch: (critic(generator(batch.x)) - 1).square().mean()).backward()
        for_generator.step()


def one_after_the_other(model: nn.Module, batch: Batch) -> Tensor:
    """Both models in one backward pass; in the last step the second one alone."""
    passed_on = model.generator(batch.x)
    return (model.critic(passed_on if batch.step < STEPS - 1 else batch.y) - 1).square().mean()


def with_eval_between(run: Run) -> None:
    for step in range(STEPS):
        run.model.eval()
        with torch.no_grad():
            run.loss(step)
        run.model.train()
        run.optimizer.zero_grad()
        run.backward(step)
        run.optimizer.step()
        run.model.eval()
        run.loss(step)


def with_closures(run: Run) -> None:
    """LBFGS evaluates the loss as often as it likes."""
    number = iter(range(STEPS))

    def closure(step: int) -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        return run.mean(loss)

    for step in number:
        run.optimizer.step(partial(closure, step))


def copied_and_saved(run: Run) -> None:
    """A copy trains on its own, on one rank only, and what was saved is loaded again after a detour."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        run.step()
        if step != 2:
            continue
        if 0 in run.ranks:
            train_a_copy(run)
        saved = io.BytesIO()
        torch.save([run.model, run.optimizer, run.model.state_dict(), run.optimizer.state_dict()], saved)
        detour(run)
        saved.seek(0)
        model, _, model_state, optimizer_state = torch.load(saved, weights_only=False)
        run.noted.append(not hooks_of(model))
        run.model.load_state_dict(model_state)
        run.optimizer.load_state_dict(optimizer_state)


def train_a_copy(run: Run) -> None:
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    for step in range(2):
        optimizer.zero_grad()
        squared(model, Batch(0, step)).backward()
        optimizer.step()
    assert not hooks_of(model)
    assert not torch.equal(model[0].weight, run.model[0].weight)


def detour(run: Run) -> None:
    for step in range(10, 12):
        run.zero_grad()
        run.backward(step)
        run.step()


def hooks_of(model: nn.Module) -> list[object]:
    return [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]


# The table


Optimizers = Callable[[nn.Module], list[Optimizer]]


def one(kind: Callable[..., Optimizer], **settings: Any) -> Optimizers:
    return lambda model: [kind(model.parameters(), **settings)]


def two_groups(model: nn.Module) -> list[Optimizer]:
    first, *rest = model.children()
    others = [p for module in rest for p in module.parameters()]
    return [SGD([{"params": first.parameters(), "lr": 0.3}, {"params": others, "weight_decay": 0.1}], lr=0.05)]


def of_parts(model: nn.Module) -> list[Optimizer]:
    return [AdamW(part.parameters(), lr=0.01 * (1 + number)) for number, part in enumerate(model.children())]


def of_layers(model: nn.Module) -> list[Optimizer]:
    return [AdamW(layer.parameters(), lr=0.01 * (1 + number)) for number, layer in enumerate(model.layers)]


def sparse_and_dense(model: nn.Module) -> list[Optimizer]:
    sparse = SparseAdam([*model.words.parameters(), *model.bag.parameters()], lr=0.05)
    return [sparse, AdamW(model.head.parameters(), lr=0.05)]


def as_it_is(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, model


def compiled_after(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return torch.compile(model, backend="aot_eager"), model


def compiled_before(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    compiled = torch.compile(model, backend="aot_eager")
    return compiled, compiled


MOMENTUM = one(SGD, lr=0.2, momentum=0.9)
ADAM = one(AdamW, lr=0.02, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained, and how."""

    loop: Callable[[Run], None] = plain
    model: Callable[[], nn.Module] = mlp
    loss: Callable[[nn.Module, Batch], Tensor] = squared
    optimizers: Optimizers = MOMENTUM
    settings: dict[str, Any] = field(default_factory=dict)  # of Sync
    parts: tuple[str, ...] = ()  # modules with a Sync of their own
    compile: Callable[[nn.Module], tuple[nn.Module, nn.Module]] = as_it_is  # what is called, and what is watched
    ddp: dict[str, Any] | None = field(default_factory=dict)  # options of DDP; None where it cannot do this
    tolerance: float = 1e-10


PLAIN = Scenario()
ANY_GRAPH = {"find_unused_parameters": True}
STATIC_GRAPH = {"static_graph": True}
SCENARIOS: dict[str, Scenario] = {
    "plain": PLAIN,
    "one bucket": Scenario(settings={"first_bucket_bytes": 1 << 20}),
    "a bucket for each": Scenario(settings={"first_bucket_bytes": 1, "bucket_bytes": 1}),
    "large gradients": Scenario(model=partial(mlp, width=100), settings={"bucket_bytes": 50_000}),
    "zeroed in place": Scenario(loop=zeroed_in_place),
    "zeroed now and then": Scenario(loop=zeroed_now_and_then),
    "several backwards": Scenario(loop=several_backwards),
    "accumulate": Scenario(loop=pairs_of_backwards, settings={"accumulate": 2}),
    "accumulate, but step early or late": Scenario(loop=several_backwards, settings={"accumulate": 2}),
    "no_sync": Scenario(loop=pairs_with_no_sync),
    "no_sync and accumulate": Scenario(loop=pairs_with_no_sync, settings={"accumulate": 2}, ddp=None),
    "no_sync at the end": Scenario(loop=no_sync_at_the_end, ddp=None),
    "clipped": Scenario(loop=clipped),
    "clipped after no_sync": Scenario(loop=clipped_after_no_sync, ddp=None),
    "clipped after waiting": Scenario(loop=clipped_after_waiting, ddp=None),
    "GradScaler": Scenario(loop=scaled, loss=infinite_once),
    "GradScaler, fused": Scenario(
        loop=scaled, loss=infinite_once, optimizers=one(AdamW, lr=0.02, fused=True), ddp=None
    ),
    "autocast": Scenario(model=partial(mlp, torch.float32), loss=squared_under_autocast, tolerance=2e-3),
    "AdamW, fused": Scenario(optimizers=one(AdamW, lr=0.02, fused=True)),
    "AdamW, foreach": Scenario(optimizers=one(AdamW, lr=0.02, foreach=True)),
    "AdamW, for loop": Scenario(optimizers=one(AdamW, lr=0.02, foreach=False)),
    "SGD, fused": Scenario(optimizers=one(SGD, lr=0.2, momentum=0.9, fused=True)),
    "SGD, foreach": Scenario(optimizers=one(SGD, lr=0.2, momentum=0.9, foreach=True)),
    "SGD, for loop": Scenario(optimizers=one(SGD, lr=0.2, momentum=0.9, foreach=False)),
    "scheduled": Scenario(loop=scheduled),
    "parameter groups": Scenario(optimizers=two_groups),
    "single precision": Scenario(model=partial(mlp, torch.float32), loss=squared_in_single, tolerance=1e-5),
    "mixed types": Scenario(model=MixedTypes, optimizers=one(SGD, lr=0.02), tolerance=1e-2),
    "tied weights": Scenario(model=Tied, loss=next_word),
    "unfrozen later": Scenario(loop=unfrozen_later, model=frozen_below, optimizers=ADAM, ddp=None),
    "frozen for others": Scenario(loop=swapped, model=frozen_below, ddp=None),
    "branches": Scenario(model=Branches, loss=of_branches, optimizers=ADAM, ddp=ANY_GRAPH),
    "absent on a rank": Scenario(loss=absent_on_a_rank, optimizers=ADAM, ddp=None),
    "absent on a rank, accumulate": Scenario(
        loop=pairs_of_backwards, loss=absent_on_a_rank, settings={"accumulate": 2}, optimizers=ADAM, ddp=None
    ),
    "absent on a rank, clipped": Scenario(loop=clipped_after_waiting, loss=absent_on_a_rank, ddp=None),
    "branches, several backwards": Scenario(
        loop=several_backwards, model=Branches, loss=of_branches, optimizers=ADAM, ddp=ANY_GRAPH
    ),
    "branches, no_sync": Scenario(loop=no_sync_at_the_end, model=Branches, loss=of_branches, optimizers=ADAM, ddp=None),
    "sparse, several backwards": Scenario(
        loop=several_backwards, model=Words, loss=squared_of_words, optimizers=one(SGD, lr=0.2), ddp=None
    ),
    "gradient penalty": Scenario(loss=with_gradient_penalty, ddp=None),
    "graph used twice": Scenario(loop=twice_through_the_graph, ddp=None),
    "sparse, SGD": Scenario(model=Words, loss=squared_of_words, optimizers=one(SGD, lr=0.2)),
    "sparse, SparseAdam": Scenario(model=Words, loss=squared_of_words, optimizers=sparse_and_dense),
    "channels last": Scenario(loop=noting_strides, model=convolutions, loss=squared_of_images, tolerance=1e-9),
    "odd layouts": Scenario(model=OddLayouts),
    "normalized, broadcast": Scenario(model=normalized, settings={"buffers": "broadcast"}),
    "normalized, average": Scenario(model=normalized, settings={"buffers": "average"}),
    "normalized, local": Scenario(model=normalized, settings={"buffers": "local"}),
    "checkpoint, reentrant": Scenario(model=partial(Checkpointed, True), loss=squared_of_a_leaf, ddp=STATIC_GRAPH),
    "checkpoint": Scenario(model=partial(Checkpointed, False), loss=squared_of_a_leaf, ddp=STATIC_GRAPH),
    "adversaries": Scenario(loop=adversaries, model=Pair, optimizers=of_parts, parts=("generator", "critic")),
    "two models, one optimizer": Scenario(
        model=Pair, loss=one_after_the_other, optimizers=ADAM, parts=("generator", "critic"), ddp=None
    ),
    "eval between": Scenario(loop=with_eval_between, model=normalized),
    "used backwards": Scenario(model=UsedBackwards),
    "copied and saved": Scenario(loop=copied_and_saved, optimizers=ADAM),
    "LBFGS": Scenario(loop=with_closures, optimizers=one(LBFGS, lr=0.1, max_iter=4), ddp=None, tolerance=1e-8),
    "LBFGS with a line search": Scenario(
        loop=with_closures, optimizers=one(LBFGS, max_iter=4, line_search_fn="strong_wolfe"), ddp=None, tolerance=1e-8
    ),
    "compared every step": Scenario(settings={"check_every": 1}, optimizers=ADAM),
}
COMPILED: dict[str, Scenario] = {
    "compiled after": Scenario(compile=compiled_after, ddp=None),
    "compiled before": Scenario(compile=compiled_before, ddp=None),
}


def train(fabric: syncline.Fabric, scenario: Scenario) -> Result:
    """What a rank does with `Sync`."""
    run = SyncRun(scenario, fabric)
    scenario.loop(run)
    return run.result()


def train_named(fabric: syncline.Fabric, name: str) -> Result:
    return train(fabric, {**SCENARIOS, **COMPILED}[name])


def train_all(fabric: syncline.Fabric, names: Sequence[str]) -> dict[str, Result]:
    """Many scenarios in one life of a rank."""
    return {name: train_named(fabric, name) for name in names}


def train_all_with_ddp(fabric: syncline.Fabric, names: Sequence[str]) -> dict[str, Result]:
    results = {}
    for name in names:
        run = DdpRun(SCENARIOS[name], fabric)
        run.scenario.loop(run)
        results[name] = run.result()
    return results


def train_alone(scenario: Scenario, world: int) -> Result:
    """One process that has the batches of all ranks, and the weights of rank 0."""
    run = Run(scenario, range(world), world, seed=0)
    scenario.loop(run)
    return run.result()


# Uneven inputs


@dataclass(frozen=True)
class Uneven:
    """Ranks with different numbers of batches, and some steps of all of them afterwards."""

    counts: tuple[int, ...]  # batches of each rank
    divide_by: Literal["world", "active"]
    scenario: Scenario = field(default_factory=lambda: replace(PLAIN, model=normalized, optimizers=ADAM))
    afterwards: int = 3


def train_unevenly(fabric: syncline.Fabric, uneven: Uneven) -> tuple[Result, Result]:
    """At the end of the uneven part, and after some more steps."""
    run = SyncRun(uneven.scenario, fabric)
    with run.sync.join(divide_by=uneven.divide_by):
        train_steps(run, range(uneven.counts[fabric.rank]))
    joined = run.result()
    train_steps(run, range(100, 100 + uneven.afterwards))
    return joined, run.result()


def train_steps(run: Run, steps: Sequence[int]) -> None:
    for step in steps:
        run.zero_grad()
        run.backward(step)
        run.step()


def train_unevenly_with_ddp(fabric: syncline.Fabric, cases: Sequence[Uneven]) -> list[Result]:
    results = []
    for uneven in cases:
        run = DdpRun(uneven.scenario, fabric)
        with Join([run.callable], divide_by_initial_world_size=uneven.divide_by == "world"):
            train_steps(run, range(uneven.counts[fabric.rank]))
        results.append(run.result())
    return results


def train_unevenly_in_turn(fabric: syncline.Fabric, cases: Sequence[Uneven]) -> list[tuple[Result, Result]]:
    return [train_unevenly(fabric, uneven) for uneven in cases]


def train_unevenly_alone(uneven: Uneven) -> tuple[Result, Result]:
    """The batches of those that are present, as one."""
    world = len(uneven.counts)
    run = Run(uneven.scenario, range(world), world, seed=0)
    for step in range(max(uneven.counts)):
        run.ranks = [rank for rank in range(world) if step < uneven.counts[rank]]
        run.zero_grad()
        share = len(run.ranks) / world if uneven.divide_by == "world" else 1.0
        (run.loss(step) * share).backward()
        run.step()
    joined = run.result()
    run.ranks = range(world)
    train_steps(run, range(100, 100 + uneven.afterwards))
    return joined, run.result()


# Ranks that make different numbers of backward passes before a step


@dataclass(frozen=True)
class Unequal:
    """How many backward passes each rank makes before a step, from the third step on; before that one."""

    counts: tuple[int, ...]
    steps: int = 2  # that have so many
    scenario: Scenario = PLAIN

    def numbers(self, rank: int, step: int) -> list[int]:
        """Of the batches that a rank takes for a step."""
        return [100 * step + number for number in range(self.counts[rank])]


@dataclass
class Refused:
    """What a rank that was refused a pass had before it and after it, and after it tried to go on."""

    error: str
    number: int  # of the pass that was refused
    before: list[Tensor]
    after: list[Tensor]
    again: list[str]


def make_unequal_passes(fabric: syncline.Fabric, unequal: Unequal) -> Refused | str:
    """Until a pass is refused; what an error of another kind said, or how it ended well."""
    run = SyncRun(unequal.scenario, fabric)
    train_steps(run, range(2))
    before: list[Tensor] = []
    try:
        for step in range(2, 2 + unequal.steps):
            run.zero_grad()
            for number in unequal.numbers(fabric.rank, step):
                before = all_that_lasts(run)
                run.backward(number)
            run.step()
    except Desync as error:
        again = [text_of_error(work) for work in (run.step, partial(run.backward, 0), run.wait)]
        return Refused(str(error), run.sync.reducer.passes, before, all_that_lasts(run), again)
    except PeerError as error:
        return f"{type(error).__name__}: {error}"
    return "went well"


def all_that_lasts(run: SyncRun) -> list[Tensor]:
    """Parameters, optimizer states, and what codecs keep."""
    kept = [value for one in run.sync.reducer.pipeline.state_dict().values() for value in one.values()]
    return [*run.result().tensors(), *(value.clone() for value in kept if isinstance(value, Tensor))]


def text_of_error(work: Callable[[], None]) -> str:
    try:
        work()
    except Desync as error:
        return str(error)
    return ""


def make_many_passes(fabric: syncline.Fabric, count: int) -> Result:
    """Before one step, in 16 bits: the verdict has to be exact in them."""
    run = SyncRun(replace(PLAIN, model=partial(mlp, torch.bfloat16), loss=squared_in_sixteen_bits), fabric)
    for _ in range(2):
        run.zero_grad()
        for number in range(count):
            run.backward(number)
        run.step()
    return run.result()


def squared_in_sixteen_bits(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x.bfloat16()) - batch.y.bfloat16()).square().mean()


def join_in_pairs(fabric: syncline.Fabric, batches: Sequence[int]) -> Result:
    """Two backward passes before each step; ranks have different numbers of batches, and train on afterwards."""
    run = SyncRun(PLAIN, fabric)
    with run.sync.join():
        for number in range(batches[fabric.rank]):
            if number % 2 == 0:
                run.zero_grad()
            run.backward(number)
            if number % 2:
                run.step()
    train_steps(run, range(100, 102))
    return run.result()


def train_with_no_sync(fabric: syncline.Fabric, unequal: Unequal) -> Result:
    """Whoever makes several backward passes before a step sends in the last one only."""
    run = SyncRun(unequal.scenario, fabric)
    for step in range(STEPS):
        run.zero_grad()
        *first, last = unequal.numbers(fabric.rank, step)
        with run.no_sync():
            for number in first:
                run.backward(number)
        run.backward(last)
        run.step()
    return run.result()


def train_unequally_alone(unequal: Unequal) -> Result:
    """One process with the batches of all ranks."""
    world = len(unequal.counts)
    run = Run(unequal.scenario, range(world), world, seed=0)
    for step in range(STEPS):
        run.zero_grad()
        for rank in range(world):
            run.ranks = [rank]
            for number in unequal.numbers(rank, step):
                (run.loss(number) / world).backward()
        run.step()
    return run.result()


# Exceptions


@dataclass(frozen=True)
class Failing:
    """Some ranks fail in some steps, and the loop goes on."""

    where: str  # a place of `Trapped`
    ranks: frozenset[int]
    then: Literal["step", "next"]  # the rank calls step all the same, or goes on with its next batch
    steps: tuple[int, ...] = (0, 2, 3)
    settings: tuple[tuple[str, Any], ...] = ()
    optimizers: Optimizers = ADAM

    def trap(self, batch: Batch) -> str:
        """Where this batch fails."""
        return self.where if batch.rank in self.ranks and batch.step in self.steps else ""


def of_trapped(failing: Failing, model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x, failing.trap(batch)) - batch.y).square().mean()


def failing_scenario(failing: Failing) -> Scenario:
    def loop(run: Run) -> None:
        for step in range(STEPS + 2):
            run.zero_grad()
            try:
                run.backward(step)
            except Boom:
                if failing.then == "next":
                    continue
            run.step()

    return Scenario(
        loop=loop,
        model=Trapped,
        loss=partial(of_trapped, failing),
        optimizers=failing.optimizers,
        settings=dict(failing.settings),
    )


def fail_and_go_on(fabric: syncline.Fabric, failing: Failing) -> Result:
    return train(fabric, failing_scenario(failing))


def be_surprised(fabric: syncline.Fabric) -> tuple[list[str], Result, Result, Result]:
    """From step 2 on a gradient comes after its bucket has left, on rank 1 only; what happened, before and after."""
    scenario = replace(PLAIN, model=MoreAndMore, loss=of_more_and_more, settings={"bucket_bytes": 1})
    run = SyncRun(scenario, fabric)
    train_steps(run, range(2))
    before, errors = run.result(), []
    run.zero_grad()
    try:
        run.backward(2)
    except LateGradient as error:
        errors.append(str(error))
    run.step()
    after = run.result()
    run.zero_grad()
    with run.no_sync():
        run.backward(3)
    run.step()
    return errors, before, after, run.result()


def of_more_and_more(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x, segments=2 if batch.step > 1 and batch.rank == 1 else 1) - batch.y).square().mean()


def surprised_alone(world: int) -> Result:
    """Without the step that was a surprise."""
    run = Run(replace(PLAIN, model=MoreAndMore, loss=of_more_and_more), range(world), world, seed=0)
    train_steps(run, [0, 1, 3])
    return run.result()


def leave_it(fabric: syncline.Fabric) -> tuple[Result, list[object]]:
    """Close, and train on with as many steps as this rank likes."""
    run = SyncRun(PLAIN, fabric)
    train_steps(run, range(2))
    run.sync.close()
    together = run.result()
    train_steps(run, range(fabric.rank))
    return together, hooks_of(run.model)


def lose_batches(fabric: syncline.Fabric, failing: Failing) -> Result:
    """Go on with the next batch after a failure, so that ranks have different numbers of batches."""
    run = SyncRun(failing_scenario(failing), fabric)
    with run.sync.join():
        failing_scenario(failing).loop(run)
    train_steps(run, range(100, 102))
    return run.result()


def without_lost_batches(failing: Failing, world: int) -> Result:
    """The first of each rank's good batches together, then the second, and so on."""
    run = Run(failing_scenario(replace(failing, ranks=frozenset())), range(world), world, seed=0)
    steps = range(STEPS + 2)
    good = [[step for step in steps if not failing.trap(Batch(rank, step))] for rank in range(world)]
    for position in range(max(map(len, good))):
        run.zero_grad()
        present = [Batch(rank, mine[position]) for rank, mine in enumerate(good) if position < len(mine)]
        (sum(run.scenario.loss(run.model, batch) for batch in present) / world).backward()
        run.step()
    train_steps(run, range(100, 102))
    return run.result()


def fail_in_turn(fabric: syncline.Fabric, cases: Sequence[Failing]) -> list[Result]:
    return [fail_and_go_on(fabric, failing) for failing in cases]


def without_failed_steps(failing: Failing, world: int) -> Result:
    """As if the batches of the steps in which a rank failed had not been there."""
    never = failing_scenario(replace(failing, ranks=frozenset()))
    run = Run(never, range(world), world, seed=0)
    train_steps(run, [step for step in range(STEPS + 2) if step not in failing.steps])
    return run.result()


def without_failed_batches(failing: Failing, world: int) -> Result:
    """As if the batches that failed said nothing about any parameter."""
    never = failing_scenario(replace(failing, ranks=frozenset()))
    run = Run(never, range(world), world, seed=0)
    for step in range(STEPS + 2):
        run.ranks = [rank for rank in range(world) if not failing.trap(Batch(rank, step))]
        run.zero_grad()
        if run.ranks:
            (run.loss(step) * len(run.ranks) / world).backward()
        run.step()
    return run.result()


def fail_in_one_of_two_backwards(fabric: syncline.Fabric, failing: Failing, first: bool) -> Result:
    """Two backward passes for each step, of which one fails; after the second a rank may go on with the next step."""
    run = SyncRun(failing_scenario(failing), fabric)
    for step in range(STEPS + 2):
        run.zero_grad()
        failed = False
        for number in (step, 100 + step) if first else (100 + step, step):
            try:
                run.backward(number)
            except Boom:
                failed = True
        if not failed or failing.then == "step":
            run.step()
    return run.result()


def two_backwards_without_failed_steps(failing: Failing, world: int) -> Result:
    never = failing_scenario(replace(failing, ranks=frozenset()))
    run = Run(never, range(world), world, seed=0)
    for step in range(STEPS + 2):
        if step not in failing.steps:
            run.zero_grad()
            run.backward(step)
            run.backward(100 + step)
            run.step()
    return run.result()


# What else a rank does


def make_one_after_the_other(fabric: syncline.Fabric, count: int) -> list[Tensor]:
    """A `Sync` is closed and the next one made, many times."""
    results = []
    for _ in range(count):
        run = SyncRun(PLAIN, fabric)
        train_steps(run, range(2))
        run.sync.close()
        results.append(run.model[0].weight.detach().clone())
    return results


def watch_buckets_leave(fabric: syncline.Fabric) -> list[list[str]]:
    """What happens in each backward pass, in order: gradients that come and buckets that leave."""
    run = SyncRun(PLAIN, fabric)
    events: list[list[str]] = []
    sends = run.sync.fabric.all_reduce_async

    def noted(*given: Any, **settings: Any) -> object:
        events[-1].append("left")
        return sends(*given, **settings)

    run.sync.fabric.all_reduce_async = noted
    for name, parameter in run.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events[-1].append(name))
    for step in range(STEPS):
        events.append([])
        train_steps(run, [step])
    return events


def buckets_before_and_after(fabric: syncline.Fabric, loss: Callable[..., Tensor]) -> list[list[list[str]]]:
    """Names by bucket, before the first step and after each."""
    run = SyncRun(replace(PLAIN, model=Branches, loss=loss, settings={"bucket_bytes": 1}), fabric)
    seen = [run.sync.buckets]
    for step in range(3):
        train_steps(run, [step])
        seen.append(run.sync.buckets)
    return seen


def in_an_order_of_its_own(model: nn.Module, batch: Batch) -> Tensor:
    """Every rank uses the parts in another order; the gradients of the part used last come first."""
    names = ["sometimes", "here_and_there", "always"]
    turn = batch.rank % len(names)
    return (model(batch.x, names[turn:] + names[:turn]) - batch.y).square().mean()


def memory_of_gradients(fabric: syncline.Fabric, name: str) -> tuple[int, int, int]:
    """How many gradients there are, in how many storages, and how many buckets."""
    run = SyncRun(SCENARIOS[name], fabric)
    train_steps(run, range(3))
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    return len(gradients), len(storages), len(run.sync.buckets)


def gradients_between(fabric: syncline.Fabric, name: str) -> list[list[Tensor | None]]:
    """What clipping sees: the gradients after each backward pass, before the step."""
    run = SyncRun(SCENARIOS[name], fabric)
    return local_gradients(run)


def local_gradients(run: Run) -> list[list[Tensor | None]]:
    seen = []
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        seen.append([None if p.grad is None else p.grad.to_dense().clone() for p in run.model.parameters()])
        run.step()
    return seen


def count_messages(fabric: syncline.Fabric, name: str) -> int:
    """Buckets sent after the first step, for each of the steps that follow."""
    run = SyncRun(SCENARIOS[name], fabric)
    train_steps(run, [0])
    before = len(run.sync.buckets)
    sends, sent = run.sync.fabric.all_reduce_async, []

    def counted(*given: Any, **settings: Any) -> object:
        sent.append(1)
        return sends(*given, **settings)

    run.sync.fabric.all_reduce_async = counted
    train_steps(run, range(1, STEPS))
    return len(sent) // (STEPS - 1) - before


def in_a_world_of_one(fabric: syncline.Fabric, name: str) -> tuple[Result, list[object], list[list[str]]]:
    run = SyncRun(SCENARIOS[name], fabric)
    run.scenario.loop(run)
    return run.result(), hooks_of(run.model), run.sync.buckets
