"""What a rank with a `Sync` does and shows: buckets, gradients, messages, and what is left when it is closed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

import syncline
from support.batches import STEPS, Batch
from support.loops import hooks_of, train_steps
from support.models import Branches
from support.runs import Result, Run, SyncRun
from support.scenarios import PLAIN, SCENARIOS


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
    start = run.sync.reducer.path.start

    def noted(*given: Any) -> None:
        events[-1].append("left")
        start(*given)

    run.sync.reducer.path.start = noted
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


def gradients_between(fabric: syncline.Fabric, name: str) -> list[dict[str, Tensor]]:
    """What clipping sees: the gradients after each backward pass, before the step."""
    run = SyncRun(SCENARIOS[name], fabric)
    return local_gradients(run)


def local_gradients(run: Run) -> list[dict[str, Tensor]]:
    """Of each step, those that are there."""
    seen = []
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        named = run.model.named_parameters()
        seen.append({name: p.grad.to_dense().clone() for name, p in named if p.grad is not None})
        run.step()
    return seen


def count_messages(fabric: syncline.Fabric, name: str) -> int:
    """Collectives beyond one a bucket and one for the status, in each of the steps after the first."""
    run = SyncRun(SCENARIOS[name], fabric)
    train_steps(run, [0])
    started = run.sync.reducer.path.channel.started
    before = started.total()
    train_steps(run, range(1, STEPS))
    return (started.total() - before) // (STEPS - 1) - len(run.sync.buckets) - 1


def in_a_world_of_one(fabric: syncline.Fabric, name: str) -> tuple[Result, list[object], list[list[str]]]:
    run = SyncRun(SCENARIOS[name], fabric)
    run.scenario.loop(run)
    return run.result(), hooks_of(run.model), run.sync.buckets
