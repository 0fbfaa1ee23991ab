"""The page of cases of the parity suite: loops as users write them, in every mode. Light: ranks import it.

What a case comes to in a mode is in its table, and is that of `support.simulated` where nothing else is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import syncline
from support.losses import of_branches
from support.models import Branches, Pair, frozen_below
from support.on_a_line import Turns
from support.runs import Result, SyncRun, put_around_step
from support.scenarios import ADAM, Scenario, of_parts, one
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
from support.user_loops import (
    STEPS,
    add_noise,
    adversaries,
    adversaries_zeroed_together,
    after_each_step,
    by_hand,
    by_plateau,
    by_turns,
    changed,
    clamp,
    clamp_data,
    clip_norm,
    clip_value,
    clipped_one_by_one,
    copied_by_hand,
    drop_first,
    evaluated,
    first_alone,
    forgetful,
    frozen_later,
    hooked,
    infinite_once,
    kept_by_turns,
    left_out,
    momenta_at_the_start,
    moving_average,
    nan_once,
    pairs,
    plain,
    put_accumulate_hooks,
    put_clamping_hooks,
    put_step_hooks,
    put_tensor_hooks,
    reloaded,
    replaced,
    scaled,
    scaled_adversaries,
    scaled_optimizers,
    scheduled,
    seldom,
    sequential,
    sharpness_aware,
    surgery,
    through_data,
    twice,
    uneven_epochs,
    unfrozen_later,
    with_closures,
    with_hooks,
    zero_data,
    zero_in_place,
    zeroed_seldom,
)
from support.weights import assert_close, assert_replicas
from syncline.errors import ConfigError, Desync, PairingError, SynclineError

EVERY = 3  # steps of a period


def of_layers(model: nn.Module) -> list[Optimizer]:
    return [SGD(model[0].parameters(), lr=0.2, momentum=0.9), AdamW(model[2:].parameters(), lr=0.02)]


# The page


class Refused(NamedTuple):
    """The right answer is an error."""

    kind: type[Exception]
    says: str


class Wrong(NamedTuple):
    """What this comes to today is wrong, and nobody is told."""

    row: str  # of the issue
    world: int = 0  # in which it shows; 0 is the smallest


@dataclass(frozen=True, kw_only=True)
class Case(Scenario):
    """A loop, and the modes in which it does not come to what `support.simulated` says."""

    but: Mapping[str, Refused | Wrong] = field(default_factory=dict)
    tolerance: float = 1e-9


PERIODIC = ("local", "slowmo", "diloco")
SERVED = ("bounded", "async")


def in_modes(modes: Sequence[str], what: Refused | Wrong) -> dict[str, Refused | Wrong]:
    return dict.fromkeys(modes, what)


SECOND_BACKWARD = Refused(ConfigError, "a second backward pass came before the optimizer's step")
FROZEN = Refused(ConfigError, "needs a gradient now, but was frozen")
FROZEN_AT_SERVERS = Refused(ConfigError, "began to need gradients after servers were set up")
CLIPPED_ALONE = Refused(ConfigError, "changed before this step .clipped.. while they were this rank's own")
CLOSURE = Refused(PairingError, "evaluates a closure in its step")
TOO_EARLY = Wrong("none: servers are given a second optimizer's gradients before they are unscaled or clipped for it")
AGAIN = Refused(ConfigError, "a step came without a backward pass since the last one")
WEIGHTS = Wrong("servers: weights, momenta or clamps that all ranks apply after Sync are thrown away")
CHANGED = Wrong("servers: gradients changed by .data or by step hooks set after Sync are ignored")
TWO_OPTIMIZERS = Wrong("servers: one Sync, two optimizers, GAN loop: nothing is ever trained")
SELDOM = Wrong("servers: a second optimizer that steps every third time")
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
    "a gradient set to None": Case(
        loop=partial(changed, change=drop_first), optimizers=ADAM, but=in_modes(SERVED, CHANGED)
    ),
    "accumulate": Case(loop=pairs, settings={"accumulate": 2}),
    "no_sync": Case(loop=partial(pairs, pause=True)),
    "accumulate, clipped": Case(loop=partial(pairs, clip=True), settings={"accumulate": 2}),
    "no_sync, clipped": Case(loop=partial(pairs, pause=True, clip=True)),
    "accumulate, clipped, the last of an epoch stepped with": Case(
        loop=partial(uneven_epochs, last="stepped with"),
        settings={"accumulate": 2},
        but=in_modes(["sync", "delayed"], CLIPPED_ALONE),
    ),
    "accumulate, clipped, the last of an epoch carried over": Case(
        loop=partial(uneven_epochs, last="carried over"),
        settings={"accumulate": 2},
        but={"delayed": SECOND_BACKWARD},
    ),
    "accumulate, clipped, the last of an epoch thrown away": Case(
        loop=partial(uneven_epochs, last="thrown away"),
        settings={"accumulate": 2},
    ),
    "accumulate, clipped, the last of an epoch waited for": Case(
        loop=partial(uneven_epochs, last="waited for"),
        settings={"accumulate": 2},
    ),
    "GAN": Case(
        loop=adversaries,
        model=Pair,
        optimizers=of_parts,
        but=in_modes(SERVED, TWO_OPTIMIZERS),
    ),
    "GAN, zeroed in place": Case(
        loop=partial(adversaries, to_none=False),
        model=Pair,
        optimizers=of_parts,
        but=in_modes(SERVED, TWO_OPTIMIZERS),
    ),
    "GAN, three steps of the critic": Case(
        loop=partial(adversaries, critic_steps=3),
        model=Pair,
        optimizers=of_parts,
        but=in_modes(SERVED, TWO_OPTIMIZERS),
    ),
    "GAN, zeroed in place, three steps of the critic": Case(
        loop=partial(adversaries, to_none=False, critic_steps=3),
        model=Pair,
        optimizers=of_parts,
        but=in_modes(SERVED, TWO_OPTIMIZERS),
    ),
    "GAN, zeroed together": Case(
        loop=adversaries_zeroed_together,
        model=Pair,
        optimizers=of_parts,
        but={"delayed": SECOND_BACKWARD, **in_modes(SERVED, TWO_OPTIMIZERS)},
    ),
    "GAN, two Syncs": Case(loop=adversaries, model=Pair, optimizers=of_parts, parts=("generator", "critic")),
    "two optimizers": Case(loop=plain, optimizers=of_layers),
    "two optimizers, one seldom": Case(loop=seldom, optimizers=of_layers, but=in_modes(SERVED, SELDOM)),
    "two optimizers by turns": Case(loop=by_turns, optimizers=of_layers, but=in_modes(SERVED, SELDOM)),
    "two optimizers by turns, clipped": Case(
        loop=partial(by_turns, clip=True), optimizers=of_layers, but=in_modes(SERVED, SELDOM)
    ),
    "two optimizers by turns, evaluated": Case(
        loop=partial(by_turns, evaluates=True), optimizers=of_layers, but=in_modes(SERVED, SELDOM)
    ),
    "two optimizers, one never": Case(loop=first_alone, optimizers=of_layers, but=in_modes(SERVED, SELDOM)),
    "two optimizers, clipped one by one": Case(
        loop=clipped_one_by_one, optimizers=of_layers, but={"bounded": TOO_EARLY, "async": TOO_EARLY._replace(world=2)}
    ),
    "EMA": Case(loop=partial(moving_average, averaged=copied_by_hand)),
    "AveragedModel": Case(
        loop=partial(moving_average, averaged=partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.7))),
    ),
    "SAM": Case(loop=sharpness_aware),
    "LBFGS": Case(
        loop=with_closures,
        optimizers=one(LBFGS, lr=0.1, max_iter=4),
        tolerance=1e-8,
        but=in_modes(["delayed", *SERVED], CLOSURE),
    ),
    "LBFGS with a line search": Case(
        loop=with_closures,
        optimizers=one(LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
        tolerance=1e-8,
        but=in_modes(["delayed", *SERVED], CLOSURE),
    ),
    "gradient surgery": Case(loop=surgery),
    "StepLR": Case(loop=partial(scheduled, make=partial(StepLR, step_size=2, gamma=0.3))),
    "warm-up, then cosine": Case(loop=partial(scheduled, make=sequential)),
    "OneCycleLR": Case(loop=partial(scheduled, make=partial(OneCycleLR, max_lr=0.3, total_steps=STEPS))),
    "OneCycleLR, AdamW": Case(
        loop=partial(scheduled, make=partial(OneCycleLR, max_lr=0.03, total_steps=STEPS)), optimizers=ADAM
    ),
    "ReduceLROnPlateau": Case(loop=by_plateau),
    "weights loaded": Case(
        loop=partial(reloaded, weights=True, state=False, at=5),
        but=in_modes(SERVED, WEIGHTS),
    ),
    "weights loaded right after Sync": Case(
        loop=partial(reloaded, weights=True, state=False, at=0),
        but=in_modes(SERVED, WEIGHTS),
    ),
    "momenta loaded": Case(loop=partial(reloaded, weights=False, state=True, at=5), but=in_modes(SERVED, WEIGHTS)),
    "momenta loaded right after Sync": Case(
        loop=partial(reloaded, weights=False, state=True, at=0), but=in_modes(SERVED, WEIGHTS)
    ),
    "weights and momenta loaded": Case(
        loop=partial(reloaded, weights=True, state=True, at=5),
        optimizers=ADAM,
        but=in_modes(SERVED, WEIGHTS),
    ),
    "momenta loaded before Sync": Case(loop=plain, optimizers=momenta_at_the_start, but=in_modes(SERVED, WEIGHTS)),
    "momenta zeroed": Case(loop=forgetful, but=in_modes(SERVED, WEIGHTS)),
    "learning rate set by hand": Case(loop=by_hand),
    "a step left out": Case(loop=left_out),
    "a step left out, zeroed in place": Case(loop=partial(left_out, zero=zero_in_place)),
    "a step left out, zeroed by .data.zero_()": Case(loop=partial(left_out, zero=zero_data)),
    "two steps for one backward": Case(loop=twice, but={"delayed": AGAIN}),
    "gradients kept over steps": Case(loop=zeroed_seldom, optimizers=one(SGD, lr=0.02)),
    "several backwards": Case(loop=pairs, but={"delayed": SECOND_BACKWARD}),
    "several backwards, clipped": Case(loop=partial(pairs, clip=True), but={"delayed": SECOND_BACKWARD}),
    "weights clamped through .data": Case(
        loop=partial(after_each_step, change=clamp_data), but=in_modes(SERVED, WEIGHTS)
    ),
    "weights clamped": Case(loop=partial(after_each_step, change=clamp), but=in_modes(SERVED, WEIGHTS)),
    "tensor hooks before Sync": Case(loop=plain, optimizers=hooked(put_tensor_hooks)),
    "tensor hooks after Sync": Case(loop=partial(with_hooks, put=put_tensor_hooks)),
    "accumulate hooks before Sync": Case(loop=plain, optimizers=hooked(put_accumulate_hooks)),
    "accumulate hooks after Sync": Case(loop=partial(with_hooks, put=put_accumulate_hooks)),
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
    "GradScaler, two optimizers": Case(
        loop=scaled_optimizers,
        optimizers=of_layers,
        scaler=SCALER,
        but={"bounded": TOO_EARLY, "async": TOO_EARLY._replace(world=2)},
    ),
    "GradScaler, GAN": Case(
        loop=scaled_adversaries,
        model=Pair,
        optimizers=of_parts,
        scaler=SCALER,
        but=in_modes(SERVED, TWO_OPTIMIZERS),
    ),
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
        syncs = super().attach(settings)
        for optimizer in self.optimizers:
            put_around_step(optimizer, self.step_in_turn)
        return syncs

    def step_in_turn(self, step: Callable, optimizer: Optimizer, *arguments: object) -> None:
        """Steps that nobody makes take their turn as well."""
        if not self.has_turn:
            self.turns.take(self.fabric.rank)
            self.has_turn = True
        step(*arguments)
        self.after_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
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


def train_all(
    fabric: syncline.Fabric, pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Result | SynclineError]:
    """Many cases in one life of a rank; those that are refused end early, on all ranks."""
    results: dict[tuple[str, str], Result | SynclineError] = {}
    for name, mode in pairs:
        try:
            results[name, mode] = train(fabric, name, mode)
        except SynclineError as error:
            results[name, mode] = error
    return results


@cache
def simulated(name: str, mode: str, world: int) -> list[Result]:
    """What every rank that trains should have."""
    return MODES[mode].simulate(case_of(name, mode), world)


def assert_as_simulated(name: str, mode: str, ranks: Sequence[Result]) -> None:
    """Parameters, and what the loop has noted; where ranks are in step, they have the same bits."""
    if MODES[mode].alike:
        assert_replicas([replace(one, noted=[]) for one in ranks])
    expected = simulated(name, mode, len(ranks))
    for found, wanted in zip(ranks[: len(expected)], expected, strict=True):  # servers are the last ranks
        assert_close(found.parameters, wanted.parameters, CASES[name].tolerance)
        assert found.noted == wanted.noted


def expectation(name: str, mode: str) -> Refused | Wrong | None:
    return CASES[name].but.get(mode.partition(",")[0])


def is_right(expected: Refused | Wrong | None, error: BaseException) -> bool:
    """Whether a refusal is the right answer; where something is wrong today, any is."""
    if isinstance(expected, Refused):
        return isinstance(error, expected.kind) and bool(re.search(expected.says, str(error)))
    return isinstance(expected, Wrong) and isinstance(error, (ConfigError, Desync))


def assert_nobody_had_to_refuse(expected: Refused | Wrong | None) -> None:
    assert not isinstance(expected, Refused), f"nobody refused, and the only right answer is {expected}"
