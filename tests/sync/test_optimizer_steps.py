"""Around `optimizer.step()`: a step that is not to be made is not called, and every optimizer that steps is known."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import syncline
from support.batches import Batch, fill
from support.catalogue import PROCESS_FABRICS
from support.models import mlp
from support.trainees import Trainee
from support.weights import assert_close
from syncline.errors import ConfigError
from syncline.fabric.base import Fabric
from syncline.replica import optimizer_steps

WORLD, STEPS = 2, 6
DEADLINES = syncline.Deadlines(20.0, join=60.0)
MODES = ["sync", "delayed", "local:every=2", "slowmo:every=2", "diloco:every=2", "async", "bounded:ahead=1"]
EVERYWHERE = [(mode, "threads") for mode in MODES] + [(mode, name) for mode in MODES[::3] for name in PROCESS_FABRICS]


class ReadsEveryGradient(Optimizer):
    """Plain SGD as users write it: a gradient that is None is an error, and every call counts."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad
        return loss


def loss_of(model: nn.Module, rank: int, step: int, nan_in: int | None = None) -> Tensor:
    batch = Batch(rank, step)
    loss = (model(batch.x) - batch.y).square().mean()
    return loss * torch.nan if step == nan_in and rank == 1 else loss


def train(fabric: Fabric, make: Callable, mode: str, nan_in: int | None = None, closes: bool = False) -> tuple:
    """Parameters after a training, how often the optimizer was called, and what the user's hooks saw."""
    model = fill(mlp(), fabric.rank)
    optimizer = make(model.parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before Sync"))
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    optimizer.register_step_post_hook(lambda *_: seen.append("after Sync"))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, fabric.rank, step, nan_in)
        if closes:
            optimizer.step(lambda loss=loss: (loss.backward(), loss)[1])
        else:
            loss.backward()
            optimizer.step()
    sync.drain()
    return dict(model.state_dict()), getattr(optimizer, "calls", None), seen


def outcomes(fabric: str = "threads", **arguments: object) -> list[tuple]:
    return syncline.run(partial(train, **arguments), WORLD, fabric, DEADLINES)


@pytest.mark.parametrize("closes", [False, True], ids=["", "closure"])
@pytest.mark.parametrize("nan_in", [None, 2], ids=["", "NaN"])
@pytest.mark.parametrize(("mode", "fabric"), EVERYWHERE)
def test_an_optimizer_that_reads_every_gradient_does_what_sgd_does(
    mode: str, fabric: str, nan_in: int | None, closes: bool
) -> None:
    ours = outcomes(fabric, make=ReadsEveryGradient, mode=mode, nan_in=nan_in, closes=closes)
    served = mode.startswith(("async", "bounded"))
    if not served:  # servers apply what arrives first
        sgd = outcomes("threads", make=partial(SGD, lr=0.1), mode=mode, nan_in=nan_in, closes=closes)
        for (mine, *_), (theirs, *_) in zip(ours, sgd, strict=True):
            assert_close(mine, theirs, 1e-12)
    for rank, (parameters, calls, _) in enumerate(ours):
        skipped = nan_in is not None and (rank == 1 or mode in ("sync", "delayed"))
        assert calls == (0 if served else STEPS - skipped)  # in delayed the first is not made, and drain makes the last
        assert all(parameter.isfinite().all() for parameter in parameters.values())


def test_hooks_of_the_user_that_come_after_a_step_do_not_see_one_that_was_not_made() -> None:
    for _, _, seen in outcomes(make=partial(SGD, lr=0.1), mode="sync", nan_in=2):
        assert seen.count("before Sync") == STEPS
        assert seen.count("after Sync") == STEPS - 1


@pytest.mark.parametrize("mode", ["async", "bounded:ahead=1"])
def test_hooks_of_the_user_see_every_step_that_a_server_makes(mode: str) -> None:
    for rank, (_, _, seen) in enumerate(outcomes(make=partial(SGD, lr=0.1), mode=mode, nan_in=2)):
        assert seen.count("before Sync") == STEPS
        assert seen.count("after Sync") == STEPS - (rank == 1)  # which has the NaN


# Who else replaces or copies `step`


def step_with_schedulers(fabric: Fabric, mode: str, first: bool) -> tuple[list[float], dict[str, Tensor], bool]:
    """A scheduler that is made before Sync, or after it, and a step that a NaN skips at the start."""
    model = fill(mlp(), fabric.rank)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedulers = [StepLR(optimizer, 2, 0.5)] if first else []
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    schedulers = schedulers or [StepLR(optimizer, 2, 0.5)]
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, fabric.rank, step, nan_in=0).backward()
        optimizer.step()
        schedulers[0].step()
        rates.append(optimizer.param_groups[0]["lr"])
    sync.close()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model, fabric.rank, 0).backward()
    optimizer.step()  # alone
    moved = not any(map(torch.equal, before, model.parameters()))
    return rates, dict(model.state_dict()), moved


@pytest.mark.parametrize("first", [True, False], ids=["before Sync", "after Sync"])
@pytest.mark.parametrize("mode", MODES)
def test_schedulers_count_every_step_and_warn_of_nothing(mode: str, first: bool) -> None:
    for rates, _, moved in syncline.run(partial(step_with_schedulers, mode=mode, first=first), WORLD, "threads"):
        assert rates == [0.1 * 0.5 ** (step // 2) for step in range(1, STEPS + 1)]
        assert moved


def test_closing_gives_the_optimizer_its_own_step_back() -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    plain, hooks = optimizer.step, len(optimizer._optimizer_step_pre_hooks)
    sync = syncline.Sync(model, optimizer)
    assert isinstance(optimizer.step, MethodType)
    assert optimizer.step != plain
    sync.close()
    assert optimizer.step == plain
    assert "step" not in vars(optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == hooks


def copy_optimizer(fabric: Fabric) -> list[str]:
    """What class the step of each copy is of: a copy is watched by nobody."""
    model = fill(mlp(), 0)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    syncline.Sync(model, optimizer, fabric=fabric)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for one in copies:
        for group in one.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        one.step()
    return [str("step" in vars(one)) for one in copies]


def test_copies_of_a_watched_optimizer_step_by_themselves() -> None:
    assert syncline.run(copy_optimizer, WORLD, "threads") == [["False", "False"]] * WORLD


def compile_step(fabric: Fabric, mode: str, compiles: bool) -> dict[str, Tensor]:
    model = fill(mlp(), fabric.rank)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, fabric.rank, number, nan_in=3).backward()
        step()
    sync.drain()
    return dict(model.state_dict())


@pytest.mark.parametrize("mode", ["sync", "delayed", "local:every=2", "diloco:every=2"])
def test_a_step_that_is_compiled_is_synchronized(mode: str) -> None:
    compiled = syncline.run(partial(compile_step, mode=mode, compiles=True), WORLD, "shm", DEADLINES)
    plain = syncline.run(partial(compile_step, mode=mode, compiles=False), WORLD, "threads", DEADLINES)
    for mine, theirs in zip(compiled, plain, strict=True):
        assert_close(mine, theirs, 1e-12)


def skip_one_of_two(fabric: Fabric) -> tuple[bool, bool]:
    """Two models with a Sync each and one optimizer: whether each model moved in a step that is bad for the first."""
    models = [fill(mlp(), seed) for seed in (1, 2)]
    optimizer = ReadsEveryGradient([p for model in models for p in model.parameters()])
    for model in models:
        syncline.Sync(model, optimizer, fabric=fabric)
    before = copy.deepcopy(models)
    first, second = (loss_of(model, fabric.rank, 0, nan_in=0 if model is models[0] else None) for model in models)
    (first + second).backward()
    optimizer.step()
    optimizer.zero_grad()
    stayed = [
        all(map(torch.equal, one.parameters(), other.parameters())) for one, other in zip(models, before, strict=True)
    ]
    sum(loss_of(model, fabric.rank, 1) for model in models).backward()
    optimizer.step()
    moved = [
        not any(map(torch.equal, one.parameters(), other.parameters()))
        for one, other in zip(models, before, strict=True)
    ]
    return all(stayed), all(moved)


def test_an_optimizer_of_two_syncs_steps_only_if_both_agree() -> None:
    assert syncline.run(skip_one_of_two, WORLD, "threads") == [(True, True)] * WORLD


# Optimizers that a Sync was not given


class Lookahead(Optimizer):
    """Wraps another optimizer, and shares its groups."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.1})

    def step(self, closure: Callable | None = None) -> None:
        self.inner.step()


def step_unknown(fabric: Fabric, mode: str, given: str) -> str:
    """What is said when an optimizer steps that Sync may not know, and whether it has moved anything then."""
    model = fill(mlp(), fabric.rank)
    inner = SGD(model.parameters(), lr=0.1)
    outer = Lookahead(inner)
    optimizers = {"inner": inner, "outer": outer, "another": SGD(model.parameters(), lr=0.1)}
    sync = syncline.Sync(model, optimizers[given], fabric=fabric, mode=mode)
    stepping = optimizers["another"] if given == "another" else outer
    if given == "another":
        stepping = SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(2):
        loss_of(model, fabric.rank, step).backward()
        try:
            stepping.step()
        except ConfigError as error:
            assert all(map(torch.equal, before, model.parameters()))
            sync.close()
            stepping.step()
            assert not any(map(torch.equal, before, model.parameters()))
            return str(error)
    return f"{sync.report().steps} steps"


@pytest.mark.parametrize(("mode", "fabric"), EVERYWHERE)
def test_a_new_optimizer_is_refused_before_it_moves_anything(mode: str, fabric: str) -> None:
    for said in syncline.run(partial(step_unknown, mode=mode, given="another"), WORLD, fabric, DEADLINES):
        assert said.startswith("this SGD changes 6 parameters of a Sync that was made with another optimizer")
        assert "close() that Sync and make another with this one" in said


@pytest.mark.parametrize("given", ["inner", "outer"])
def test_an_optimizer_around_another_is_known_by_either(given: str) -> None:
    for said in syncline.run(partial(step_unknown, mode="sync", given=given), WORLD, "threads"):
        assert said == "2 steps"


def step_base(fabric: Fabric) -> str:
    """The optimizer inside the one that Sync was given steps by itself, as that of SAM does."""
    model = fill(mlp(), fabric.rank)
    outer = Lookahead(SGD(model.parameters(), lr=0.1))
    syncline.Sync(model, outer, fabric=fabric)
    loss_of(model, fabric.rank, 0).backward()
    with pytest.raises(ConfigError) as caught:
        outer.inner.step()
    return str(caught.value)


def test_the_inner_optimizer_of_a_known_one_is_refused_where_it_steps_by_itself() -> None:
    for said in syncline.run(step_base, WORLD, "threads"):
        assert "made with another optimizer" in said


def step_a_stranger(fabric: Fabric) -> bool:
    """An optimizer of a model that no Sync has."""
    model, other = fill(mlp(), fabric.rank), fill(mlp(), fabric.rank)
    syncline.Sync(model, SGD(model.parameters(), lr=0.1), fabric=fabric)
    optimizer = SGD(other.parameters(), lr=0.1)
    before = copy.deepcopy(other)
    loss_of(other, fabric.rank, 0).backward()
    optimizer.step()
    return not any(map(torch.equal, before.parameters(), other.parameters()))


def test_optimizers_of_other_models_are_left_alone() -> None:
    assert syncline.run(step_a_stranger, WORLD, "threads") == [True] * WORLD


def replace_layer(fabric: Fabric, mode: str) -> tuple[str, bool]:
    """What is said in the first step after a layer was replaced, and whether nothing has moved then."""
    model = fill(mlp(), fabric.rank)
    optimizer = SGD(model.parameters(), lr=0.1)
    syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    model[2] = fill(nn.Linear(12, 12, dtype=torch.float64), fabric.rank)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model, fabric.rank, 0).backward()
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    return str(caught.value), all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("mode", ["sync", "delayed", "local:every=8", "slowmo:every=8", "diloco:every=8", "async"])
def test_a_layer_that_was_replaced_is_refused_in_the_first_step(mode: str) -> None:
    for said, stayed in syncline.run(partial(replace_layer, mode=mode), WORLD, "threads"):
        assert said.startswith("2.weight is not the parameter any more")
        assert stayed


def test_ranks_that_are_threads_close_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    class Paused(WeakKeyDictionary):
        """Where a rank has let go of its optimizer, another one does so too if it can."""

        def pop(self, *key: Any) -> Any:
            found = super().pop(*key)
            with suppress(threading.BrokenBarrierError):
                both.wait(0.1)
            return found

    monkeypatch.setattr(optimizer_steps, "_watched", Paused())
    assert not syncline.run(close_together, 2, "threads")[0]


def close_together(fabric: syncline.Fabric) -> list[Any]:
    trainee = Trainee(fabric, "sync")
    fabric.barrier()
    trainee.sync.close()
    fabric.barrier()
    return optimizer_steps._global_hook
