"""The table of scenarios, and one loop three times: on ranks, in one process on the whole batch, and with DDP.

A `Scenario` is a model, optimizers and a loop as a user would write it. Light: ranks import it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer, SparseAdam

import syncline
from support.batches import Batch
from support.loops import (
    adversaries,
    clipped,
    clipped_after_no_sync,
    clipped_after_waiting,
    copied_and_saved,
    laid_out_anew,
    no_sync_at_the_end,
    noting_strides,
    one_after_the_other,
    pairs_of_backwards,
    pairs_with_no_sync,
    plain,
    scaled,
    scheduled,
    several_backwards,
    swapped,
    twice_through_the_graph,
    unfrozen_later,
    with_closures,
    with_eval_between,
    with_gradients_moved,
    zeroed_in_place,
    zeroed_now_and_then,
)
from support.losses import (
    absent_on_a_rank,
    infinite_once,
    next_word,
    of_branches,
    squared,
    squared_in_single,
    squared_of_a_leaf,
    squared_of_images,
    squared_of_words,
    squared_under_autocast,
    with_gradient_penalty,
)
from support.models import (
    Branches,
    Checkpointed,
    MixedTypes,
    OddLayouts,
    Pair,
    Tied,
    UsedBackwards,
    Words,
    convolutions,
    frozen_below,
    mlp,
    normalized,
)
from support.runs import DdpRun, Result, Run, SyncRun

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


def compiled_after(model: nn.Module, backend: str) -> tuple[nn.Module, nn.Module]:
    return torch.compile(model, backend=backend), model


def compiled_before(model: nn.Module, backend: str) -> tuple[nn.Module, nn.Module]:
    compiled = torch.compile(model, backend=backend)
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
    scaler: Callable[[], torch.amp.GradScaler] | None = None  # that Sync is given
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
    "GradScaler, fused": Scenario(loop=scaled, loss=infinite_once, optimizers=one(AdamW, lr=0.02, fused=True)),
    "autocast": Scenario(model=partial(mlp, torch.float32), loss=squared_under_autocast, tolerance=2e-3),
    "AdamW, fused": Scenario(optimizers=one(AdamW, lr=0.02, fused=True)),
    "AdamW, foreach": Scenario(optimizers=one(AdamW, lr=0.02, foreach=True)),
    "AdamW, for loop": Scenario(optimizers=one(AdamW, lr=0.02, foreach=False)),
    "SGD, fused": Scenario(optimizers=one(SGD, lr=0.2, momentum=0.9, fused=True)),
    "SGD, foreach": Scenario(optimizers=one(SGD, lr=0.2, momentum=0.9, foreach=True)),
    "SGD, for loop": Scenario(optimizers=one(SGD, lr=0.2, momentum=0.9, foreach=False)),
    "scheduled": Scenario(loop=scheduled),
    "parameter groups": Scenario(optimizers=two_groups),
    "single precision": Scenario(model=partial(mlp, torch.float32), loss=squared_in_single),
    "mixed types": Scenario(model=MixedTypes, optimizers=one(SGD, lr=0.3)),
    "tied weights": Scenario(model=Tied, loss=next_word),
    "tied weights, sparse": Scenario(model=partial(Tied, sparse=True), loss=next_word, optimizers=ADAM, ddp=None),
    "gradients moved": Scenario(loop=with_gradients_moved, ddp=None),
    "laid out anew": Scenario(
        loop=laid_out_anew,
        model=partial(convolutions, torch.contiguous_format),
        loss=squared_of_images,
        optimizers=one(SGD, lr=0.02),
        ddp=None,
    ),
    "unfrozen later": Scenario(loop=unfrozen_later, model=frozen_below, optimizers=ADAM),
    "frozen for others": Scenario(loop=swapped, model=frozen_below),
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
        loop=several_backwards, model=Words, loss=squared_of_words, optimizers=one(SGD, lr=0.2)
    ),
    "gradient penalty": Scenario(loss=with_gradient_penalty),
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
    "checkpoint, reentrant, absent on a rank": Scenario(
        model=partial(Checkpointed, True), loss=partial(absent_on_a_rank, otherwise=squared_of_a_leaf), ddp=None
    ),
    "adversaries": Scenario(loop=adversaries, model=Pair, optimizers=of_parts, parts=("generator", "critic")),
    "two models, one optimizer": Scenario(
        model=Pair, loss=one_after_the_other, optimizers=ADAM, parts=("generator", "critic")
    ),
    "eval between": Scenario(loop=with_eval_between, model=normalized),
    "used backwards": Scenario(model=UsedBackwards),
    "copied and saved": Scenario(loop=copied_and_saved, optimizers=ADAM),
    "LBFGS": Scenario(loop=with_closures, optimizers=one(LBFGS, lr=0.1, max_iter=4), tolerance=1e-8),
    "LBFGS with a line search": Scenario(
        loop=with_closures, optimizers=one(LBFGS, max_iter=4, line_search_fn="strong_wolfe"), tolerance=1e-8
    ),
    "compared every step": Scenario(settings={"check_every": 1}, optimizers=ADAM),
}
COMPILED: dict[str, Scenario] = {
    "compiled after": Scenario(compile=partial(compiled_after, backend="aot_eager")),
    "compiled before": Scenario(compile=partial(compiled_before, backend="aot_eager")),
}
TO_MACHINE_CODE: dict[str, Scenario] = {  # by the backend that torch.compile has when nothing is said
    "to machine code after": Scenario(compile=partial(compiled_after, backend="inductor")),
    "to machine code before": Scenario(compile=partial(compiled_before, backend="inductor")),
}
ALL = {**SCENARIOS, **COMPILED, **TO_MACHINE_CODE}


def train(fabric: syncline.Fabric, scenario: Scenario) -> Result:
    """What a rank does with `Sync`."""
    run = SyncRun(scenario, fabric)
    scenario.loop(run)
    return run.result()


def train_named(fabric: syncline.Fabric, name: str) -> Result:
    return train(fabric, ALL[name])


def train_all(fabric: syncline.Fabric, names: Sequence[str]) -> dict[str, Result]:
    """Many scenarios in one life of a rank."""
    return {name: train_named(fabric, name) for name in names}


def train_all_with_ddp(fabric: syncline.Fabric, names: Sequence[str]) -> dict[str, Result]:
    results = {}
    for name in names:
        run = DdpRun(ALL[name], fabric)
        run.scenario.loop(run)
        results[name] = run.result()
    return results


def train_to_machine_code(fabric: syncline.Fabric, with_ddp: bool, folder: str) -> dict[str, Result]:
    """With a folder for what the compiler leaves."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    return (train_all_with_ddp if with_ddp else train_all)(fabric, tuple(TO_MACHINE_CODE))


def train_alone(scenario: Scenario, world: int) -> Result:
    """One process that has the batches of all ranks, and the weights of rank 0."""
    run = Run(scenario, range(world), world, seed=0)
    scenario.loop(run)
    return run.result()
