"""The page of cases of the parity suite: loops as users write them, each for every mode. Light: ranks import it.

What a case comes to in a mode is in its table, and is that of `support.simulated` where nothing else is said.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import syncline
from support.batches import ROWS, Batch, generator_of
from support.losses import of_branches, squared
from support.models import Branches, Pair, frozen_below, mlp
from support.on_a_line import Turns
from support.runs import Result, Run, SyncRun
from support.scenarios import ADAM, MOMENTUM, Optimizers, Scenario, of_parts, one
from support.simulated import (
    Delayed,
    Follow,
    InTurn,
    Lockstep,
    Nesterov,
    Periodic,
    Simulated,
    SlowMomentum,
    in_one_process,
    in_threads,
)
from syncline.errors import ConfigError, RankFailed

STEPS = 7  # two periods of three steps, and one step
EVERY = 3

# Loops


def one_step(run: Run, step: int) -> None:
    run.zero_grad()
    run.backward(step)
    run.step()


def plain(run: Run) -> None:
    for step in range(STEPS):
        one_step(run, step)


def kept_by_turns(run: Run, to_none: Sequence[bool]) -> None:
    """Gradients are zeroed in place or set to None, by turns."""
    for step in range(STEPS):
        for optimizer in run.optimizers:
            optimizer.zero_grad(set_to_none=to_none[step % len(to_none)])
        run.backward(step)
        run.step()


def changed(run: Run, change: Callable[[Run, int], None]) -> None:
    """Gradients are changed between backward and step."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        change(run, step)
        run.step()


def clip_norm(run: Run, step: int) -> None:
    run.noted.append(bool(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1) > 0.1))


def clip_value(run: Run, step: int) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 0.02)


def add_noise(run: Run, step: int) -> None:
    """The same on all ranks."""
    generator = generator_of(step, 5)
    for parameter in run.model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if parameter.grad is not None:
            parameter.grad += 0.1 * drawn


def through_data(run: Run, step: int, change: Callable[[Tensor], Tensor | None]) -> None:
    """As older code does it, past autograd."""
    for parameter in run.model.parameters():
        if parameter.grad is not None and (found := change(parameter.grad.data)) is not None:
            parameter.grad.data = found


def replaced(run: Run, step: int) -> None:
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad = 0.5 * parameter.grad.detach()


def pairs(run: Run, pause: bool = False, clip: bool = False) -> None:
    """Two backward passes a step."""
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        if pause:
            with run.no_sync():
                run.backward(2 * step)
        else:
            run.backward(2 * step)
        run.backward(2 * step + 1)
        if clip:
            clip_norm(run, step)
        run.optimizer.step()


def real_from_fake(run: Run) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The losses of the critic and of the generator."""
    generator, critic = run.model.generator, run.model.critic

    def of_critic(_: nn.Module, batch: Batch) -> Tensor:
        scores = critic(torch.cat([batch.y, generator(batch.x).detach()]))
        return (scores[:ROWS] - 1).square().mean() + scores[ROWS:].square().mean()

    def of_generator(_: nn.Module, batch: Batch) -> Tensor:
        return (critic(generator(batch.x)) - 1).square().mean()

    return of_critic, of_generator


def adversaries(run: Run) -> None:
    """The usual loop of a GAN: the critic learns, then the generator through the critic."""
    for_generator, for_critic = run.optimizers
    of_critic, of_generator = real_from_fake(run)
    for step in range(STEPS):
        for_critic.zero_grad()
        run.backward(step, of_critic)
        for_critic.step()
        for_generator.zero_grad()
        run.backward(step, of_generator)
        for_generator.step()


def seldom(run: Run) -> None:
    """The second optimizer steps every third time."""
    first, second = run.optimizers
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        first.step()
        if step % 3 == 2:
            second.step()


def moving_average(run: Run, averaged: Callable[[nn.Module], nn.Module]) -> None:
    """Of the weights after every step."""
    average = averaged(run.model)
    for step in range(STEPS):
        one_step(run, step)
        if isinstance(average, AveragedModel):
            average.update_parameters(run.model)
        else:
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), run.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.3)
    run.note(average)


def copied_by_hand(model: nn.Module) -> nn.Module:
    other = mlp()
    other.load_state_dict(model.state_dict())
    return other


def sharpness_aware(run: Run) -> None:
    """SAM: up to where the loss is worst, its gradient there, back again, and a step with it."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        with torch.no_grad():
            gradients = [(p, p.grad.clone()) for p in run.model.parameters() if p.grad is not None]
            norm = sum(gradient.square().sum() for _, gradient in gradients) ** 0.5 + 1e-12
            for parameter, gradient in gradients:
                parameter.add_(0.05 * gradient / norm)
        run.zero_grad()
        run.backward(step)
        with torch.no_grad():
            for parameter, gradient in gradients:
                parameter.sub_(0.05 * gradient / norm)
        run.step()


def with_closures(run: Run) -> None:
    """LBFGS evaluates the loss as often as it likes."""

    def closure(step: int) -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(step)
        run.backward_of(loss)
        return loss.detach() if trains_alone(run) else run.mean(loss)

    for step in range(STEPS):
        run.optimizer.step(partial(closure, step))


def trains_alone(run: Run) -> bool:
    """Whether ranks go different ways between two steps, so that none can ask the others inside one."""
    return run.scenario.settings["mode"].partition(":")[0] in PERIODIC


def surgery(run: Run) -> None:
    """Gradients of two tasks are kept over zero_grad(), by reference, and put together."""

    def other_task(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch.x) + 2 * batch.y).abs().mean()

    for step in range(STEPS):
        kept = []
        for task in (squared, other_task):
            run.zero_grad()
            run.backward(step, task)
            kept.append([p.grad for p in run.model.parameters()])
        for parameter, first, second in zip(run.model.parameters(), *kept, strict=True):
            if first is not None and second is not None:
                parameter.grad = first + 0.5 * second
        run.step()


def scheduled(run: Run, make: Callable[[Optimizer], Any]) -> None:
    schedule = make(run.optimizer)
    for step in range(STEPS):
        one_step(run, step)
        schedule.step()
        run.noted.append(schedule.get_last_lr())


def by_plateau(run: Run) -> None:
    """On the mean loss of all ranks, which all of them have."""
    schedule = ReduceLROnPlateau(run.optimizer, factor=0.5, patience=0, threshold=0.05)
    for step in range(STEPS):
        one_step(run, step)
        with torch.no_grad():
            schedule.step(run.mean(run.loss(0)).item())
        run.noted.append(schedule.get_last_lr())


def sequential(optimizer: Optimizer) -> SequentialLR:
    first = LinearLR(optimizer, 0.2, total_iters=2)
    return SequentialLR(optimizer, [first, CosineAnnealingLR(optimizer, STEPS)], [2])


def reloaded(run: Run, weights: bool, state: bool) -> None:
    """All ranks load what all had saved two steps before, or the weights of a model that was trained elsewhere."""
    other = {name: 0.5 * tensor.cos() for name, tensor in run.model.state_dict().items()}
    for step in range(STEPS):
        if step == 3:
            run.drain()
            saved = copy.deepcopy(run.optimizer.state_dict())
        if step == 5 and weights:
            run.model.load_state_dict(other)
            run.loaded()
        if step == 5 and state:
            run.optimizer.load_state_dict(saved)
        one_step(run, step)


def after_each_step(run: Run, change: Callable[[nn.Module], None]) -> None:
    for step in range(STEPS):
        one_step(run, step)
        change(run.model)


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


def with_hooks(run: Run, put: Callable[[nn.Module, Sequence[Optimizer]], None]) -> None:
    """Set after Sync was made."""
    put(run.model, run.optimizers)
    plain(run)


def evaluated(run: Run) -> None:
    for step in range(STEPS):
        one_step(run, step)
        if step % 2:
            run.model.eval()
            with torch.no_grad():
                run.noted.append(bool(run.loss(step).isfinite()))
            run.model.train()


def frozen_later(run: Run) -> None:
    for step in range(STEPS):
        run.let_learn(run.model[0], step < 3)
        one_step(run, step)


def unfrozen_later(run: Run) -> None:
    for step in range(STEPS):
        run.let_learn(run.model[2], step >= 3)
        one_step(run, step)


def scaled(run: Run) -> None:
    for step in range(STEPS):
        run.zero_grad()
        run.backward_of(run.scaler.scale(run.loss(step)))
        run.scaler.unscale_(run.optimizer)
        clip_norm(run, step)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.noted.append(run.scaler.get_scale())


def infinite_once(model: nn.Module, batch: Batch) -> Tensor:
    return squared(model, batch) * (torch.inf if batch.rank and batch.step == 2 else 1.0)


def nan_once(model: nn.Module, batch: Batch) -> Tensor:
    return squared(model, batch) * (torch.nan if (batch.rank, batch.step) == (0, 2) else 1.0)


# Hooks; linear ones, so that ranks may set them on gradients of their own


def halve(gradient: Tensor) -> Tensor:
    return 0.5 * gradient


def halve_another(parameter: Tensor) -> None:
    """Not in place, where a bucket that has left may or may not see it in time."""
    parameter.grad = 0.5 * parameter.grad


def put_tensor_hooks(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    for parameter in model.parameters():
        parameter.register_hook(halve)


def put_accumulate_hooks(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve_another)


def put_step_hooks(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """That change gradients before the step."""

    def halve_all(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    halve_another(parameter)

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(halve_all)


def put_clamping_hooks(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """That change weights after the step."""
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: clamp(model))


def hooked(put: Callable[[nn.Module, Sequence[Optimizer]], None], made: Optimizers = MOMENTUM) -> Optimizers:
    """Hooks that were set before Sync is made."""

    def make(model: nn.Module) -> list[Optimizer]:
        optimizers = made(model)
        put(model, optimizers)
        return optimizers

    return make


def of_layers(model: nn.Module) -> list[Optimizer]:
    return [SGD(model[0].parameters(), lr=0.2, momentum=0.9), AdamW(model[2:].parameters(), lr=0.02)]


# The page


class Refused(NamedTuple):
    """The right answer is an error."""

    kind: type[Exception]
    says: str


class Wrong(NamedTuple):
    """What this comes to today is wrong, and nobody is told, or it fails for no good reason."""

    row: str  # of the issue
    fails_with: type[Exception] = AssertionError
    only: Refused | None = None  # the only right answer, where there is no other
    world: int = 0  # in which it shows; 0 is the smallest


@dataclass(frozen=True, kw_only=True)
class Case(Scenario):
    """A loop, and the modes in which it does not come to what `support.simulated` says."""

    but: Mapping[str, Refused | Wrong] = field(default_factory=dict)
    tolerance: float = 1e-9


PERIODIC = ("local", "slowmo", "diloco")
OUTER = ("slowmo", "diloco")
SERVED = ("bounded", "async")


def in_modes(modes: Sequence[str], what: Refused | Wrong) -> dict[str, Refused | Wrong]:
    return dict.fromkeys(modes, what)


FROZEN = Refused(ConfigError, "needs a gradient now, but was frozen")
FROZEN_AT_SERVERS = Refused(ConfigError, "began to need gradients after servers were set up")
THROWN_AWAY = Wrong("path: delayed, gradients that zero_grad() threw away are applied")
NO_DELAY = Wrong(
    "path: delayed, gradients that zero_grad() threw away are applied; in the end there is no closure to step with",
    RankFailed,
    Refused(ConfigError, "closure|delayed"),
)
KEPT = Wrong("path: gradients kept by reference over zero_grad()")
NO_CLOSURE = Wrong(
    "none: servers step without the closure that the optimizer needs, and are lost",
    RankFailed,
    Refused(ConfigError, "closure"),
)
WEIGHTS = Wrong("servers: weights, momenta or clamps that all ranks apply after Sync are thrown away")
CHANGED = Wrong("servers: gradients changed by .data or by step hooks set after Sync are ignored")
TWO_OPTIMIZERS = Wrong("servers: one Sync, two optimizers, GAN loop: nothing is ever trained")
SELDOM = Wrong("servers: a second optimizer that steps every third time")
LOADED = Wrong("diloco, slowmo: weights loaded by all ranks after Sync are taken for training progress")
SCALER = partial(torch.amp.GradScaler, "cpu", init_scale=1024.0, growth_interval=2)
CASES: dict[str, Case] = {
    "plain": Case(loop=plain),
    "plain, AdamW": Case(loop=plain, optimizers=ADAM),
    "unused parameters": Case(loop=plain, model=Branches, loss=of_branches, optimizers=ADAM),
    "zeroed to None": Case(loop=partial(kept_by_turns, to_none=[True])),
    "zeroed in place": Case(loop=partial(kept_by_turns, to_none=[False])),
    "zeroed by turns": Case(loop=partial(kept_by_turns, to_none=[False, True])),
    "clipped by norm": Case(loop=partial(changed, change=clip_norm)),
    "clipped by value": Case(
        loop=partial(changed, change=clip_value),
        but={"delayed": Wrong("crash: who reads p.grad gets None in delayed, in its first step", RankFailed)},
    ),
    "gradient noise": Case(loop=partial(changed, change=add_noise)),
    "gradients replaced": Case(loop=partial(changed, change=replaced)),
    ".grad.data = ...": Case(
        loop=partial(changed, change=partial(through_data, change=lambda grad: 0.5 * grad)),
        but=in_modes(SERVED, CHANGED),
    ),
    ".grad.data.neg_()": Case(
        loop=partial(changed, change=partial(through_data, change=Tensor.neg_)),
        optimizers=one(SGD, lr=0.01),
        but=in_modes(SERVED, CHANGED._replace(world=2)),
    ),
    ".grad.data.clamp_()": Case(
        loop=partial(changed, change=partial(through_data, change=lambda grad: grad.clamp_(-0.02, 0.02)))
    ),
    "accumulate": Case(loop=pairs, settings={"accumulate": 2}),
    "no_sync": Case(loop=partial(pairs, pause=True)),
    "accumulate, clipped": Case(loop=partial(pairs, clip=True), settings={"accumulate": 2}),
    "no_sync, clipped": Case(loop=partial(pairs, pause=True, clip=True)),
    "GAN": Case(
        loop=adversaries,
        model=Pair,
        optimizers=of_parts,
        but={"delayed": THROWN_AWAY, **in_modes(SERVED, TWO_OPTIMIZERS)},
    ),
    "GAN, two Syncs": Case(
        loop=adversaries, model=Pair, optimizers=of_parts, parts=("generator", "critic"), but={"delayed": THROWN_AWAY}
    ),
    "two optimizers": Case(loop=plain, optimizers=of_layers),
    "two optimizers, one seldom": Case(
        loop=seldom, optimizers=of_layers, but={"delayed": THROWN_AWAY, **in_modes(SERVED, SELDOM)}
    ),
    "EMA": Case(loop=partial(moving_average, averaged=copied_by_hand)),
    "AveragedModel": Case(
        loop=partial(moving_average, averaged=partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.7))),
        but={"delayed": Wrong("crash: delayed, AveragedModel: cannot pickle", RankFailed)},
    ),
    "SAM": Case(loop=sharpness_aware, but={"delayed": THROWN_AWAY}),
    "LBFGS": Case(
        loop=with_closures,
        optimizers=one(LBFGS, lr=0.1, max_iter=4),
        tolerance=1e-8,
        but={"delayed": NO_DELAY, **in_modes(SERVED, NO_CLOSURE)},
    ),
    "LBFGS with a line search": Case(
        loop=with_closures,
        optimizers=one(LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
        tolerance=1e-8,
        but={"delayed": NO_DELAY, **in_modes(SERVED, NO_CLOSURE)},
    ),
    "gradient surgery": Case(loop=surgery, but={"delayed": THROWN_AWAY, **in_modes(["sync", *SERVED], KEPT)}),
    "StepLR": Case(loop=partial(scheduled, make=partial(StepLR, step_size=2, gamma=0.3))),
    "warm-up, then cosine": Case(loop=partial(scheduled, make=sequential)),
    "OneCycleLR": Case(loop=partial(scheduled, make=partial(OneCycleLR, max_lr=0.3, total_steps=STEPS))),
    "OneCycleLR, AdamW": Case(
        loop=partial(scheduled, make=partial(OneCycleLR, max_lr=0.03, total_steps=STEPS)), optimizers=ADAM
    ),
    "ReduceLROnPlateau": Case(loop=by_plateau),
    "weights loaded": Case(
        loop=partial(reloaded, weights=True, state=False), but=in_modes(OUTER, LOADED) | in_modes(SERVED, WEIGHTS)
    ),
    "optimizer state loaded": Case(loop=partial(reloaded, weights=False, state=True), but=in_modes(SERVED, WEIGHTS)),
    "both loaded": Case(
        loop=partial(reloaded, weights=True, state=True),
        optimizers=ADAM,
        but=in_modes(OUTER, LOADED) | in_modes(SERVED, WEIGHTS),
    ),
    "weights clamped": Case(loop=partial(after_each_step, change=clamp), but=in_modes(SERVED, WEIGHTS)),
    "tensor hooks before Sync": Case(loop=plain, optimizers=hooked(put_tensor_hooks)),
    "tensor hooks after Sync": Case(loop=partial(with_hooks, put=put_tensor_hooks)),
    "accumulate hooks before Sync": Case(loop=plain, optimizers=hooked(put_accumulate_hooks)),
    "accumulate hooks after Sync": Case(
        loop=partial(with_hooks, put=put_accumulate_hooks),
        but=in_modes(["sync", "delayed"], Wrong("path: a post-accumulate hook that changes gradients, set after Sync")),
    ),
    "step pre-hooks before Sync": Case(loop=plain, optimizers=hooked(put_step_hooks)),
    "step pre-hooks after Sync": Case(loop=partial(with_hooks, put=put_step_hooks), but=in_modes(SERVED, CHANGED)),
    "step post-hooks before Sync": Case(
        loop=plain, optimizers=hooked(put_clamping_hooks), but=in_modes(SERVED, WEIGHTS)
    ),
    "step post-hooks after Sync": Case(loop=partial(with_hooks, put=put_clamping_hooks), but=in_modes(SERVED, WEIGHTS)),
    "frozen later": Case(loop=frozen_later),
    "unfrozen later": Case(
        loop=unfrozen_later, model=frozen_below, but=in_modes(PERIODIC, FROZEN) | in_modes(SERVED, FROZEN_AT_SERVERS)
    ),
    "NaN skipped": Case(loop=plain, loss=nan_once, optimizers=ADAM),
    "GradScaler": Case(loop=scaled, scaler=SCALER),
    "GradScaler, overflow": Case(loop=scaled, loss=infinite_once, scaler=SCALER),
    "evaluated between": Case(loop=evaluated),
}


# Modes, and what each comes to


class ModeCase(NamedTuple):
    """A mode, and how it is simulated."""

    spec: str
    worlds: tuple[int, ...]
    simulate: Callable[[Scenario, int], list[Result]]  # what every rank that trains should have
    alike: bool = True  # all ranks have the same bits, also in their optimizers


def periodic(outer: Callable[[], Any]) -> Callable[[Scenario, int], list[Result]]:
    return partial(in_threads, lambda *given: Periodic(*given, every=EVERY, outer=outer()))


def in_turn(scenario: Scenario, world: int) -> list[Result]:
    """One worker trains as if it were alone."""
    return in_threads(InTurn, scenario, world) if world > 1 else in_one_process(Simulated, scenario, 1)


MODES: dict[str, ModeCase] = {
    "sync": ModeCase("sync", (2, 3), partial(in_one_process, Simulated)),
    "delayed": ModeCase("delayed", (2, 3), partial(in_one_process, Delayed)),
    "local": ModeCase(f"local:every={EVERY}", (2, 3), periodic(Follow), alike=False),
    "slowmo": ModeCase(
        f"slowmo:every={EVERY},momentum=0.5,lr=0.9", (2, 3), periodic(partial(SlowMomentum, 0.9, 0.5)), alike=False
    ),
    "diloco": ModeCase(f"diloco:every={EVERY}", (2, 3), periodic(partial(Nesterov, 0.7, 0.9)), alike=False),
    "bounded": ModeCase("bounded:ahead=0,servers=2", (2, 3), partial(in_threads, Lockstep)),
    "async": ModeCase("async", (1, 2, 3), in_turn, alike=False),
    "async, apart": ModeCase("async:apart=true", (2,), lambda scenario, _: in_turn(scenario, 1), alike=False),
}


class TurnRun(SyncRun):
    """Ranks that are threads, of which one after the other makes a round of steps."""

    def __init__(self, scenario: Scenario, fabric: syncline.Fabric, turns: Turns) -> None:
        self.turns = turns
        self.has_turn = False
        self.stepped: set[Optimizer] = set()
        super().__init__(scenario, fabric)

    def attach(self, settings: dict[str, Any]) -> list[syncline.Sync]:
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self.before_step)
        syncs = super().attach(settings)
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(self.after_step)
        return syncs

    def before_step(self, *_: object) -> None:
        if not self.has_turn:
            self.turns.take(self.fabric.rank)
            self.has_turn = True

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """A round is over when all optimizers of a Sync have made a step."""
        self.stepped.add(optimizer)
        for sync in self.syncs:
            if self.stepped.issuperset(sync.optimizers):
                self.stepped.difference_update(sync.optimizers)
                self.has_turn = False
                self.turns.pass_on()


def case_of(name: str, mode: str) -> Case:
    case = CASES[name]
    return replace(case, settings={**case.settings, "mode": MODES[mode].spec})


def train(fabric: syncline.Fabric, name: str, mode: str, turns: Turns | None = None) -> Result:
    """What a rank does with `Sync`."""
    case = case_of(name, mode)
    run = SyncRun(case, fabric) if turns is None else TurnRun(case, fabric, turns)
    try:
        if not run.serves():
            case.loop(run)
            run.drain()
        return run.result()
    finally:
        for sync in run.syncs:
            sync.close()


def train_all(fabric: syncline.Fabric, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Result]:
    """Many cases in one life of a rank."""
    return {(name, mode): train(fabric, name, mode) for name, mode in pairs}


def simulated(name: str, mode: str, world: int) -> list[Result]:
    """What every rank should have."""
    return MODES[mode].simulate(case_of(name, mode), world)
