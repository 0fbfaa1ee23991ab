"""What ranks do in tests of codecs between hosts. Light, because every process of a rank imports it: no pytest."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import syncline
from support.families import at_rest, left_since, outcome_and_error
from support.striking import report_and_stay
from syncline.tracing import quality

RATES = (0.5, 0.5, 0.05, 0.05, 0.0, 0.2, 0.2, 0.1)
SMALL = {"bucket_bytes": 2000, "first_bucket_bytes": 500}
SHAPES = ((24, 20), (37,), (16, 12, 2))


class Steep(nn.Module):
    """Its gradients are what it is given: the loss is a plain product."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(SHAPES[0]))
        self.vector = nn.Parameter(torch.zeros(SHAPES[1]))
        self.other = nn.Parameter(torch.zeros(SHAPES[2]))

    def forward(self, slopes: list[Tensor]) -> Tensor:
        return sum((p * s.to(p.dtype)).sum() for p, s in zip(self.parameters(), slopes, strict=True))


def slopes_of(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def means_of_hosts(step: int, host: int, size: int) -> list[Tensor]:
    """What the ranks of a host have on average, if all hosts have so many."""
    ranks = [slopes_of(step, host * size + number) for number in range(size)]
    return [sum(slopes[1:], slopes[0]) / size for slopes in zip(*ranks, strict=True)]


class Moved(NamedTuple):
    """How far parameters went, what is still kept in the units of a step, the codec's state and the bytes said."""

    moved: list[Tensor]
    kept: list[Tensor]
    state: dict[str, Tensor]
    said: int
    saved: tuple[dict, dict]  # parameters and state, to go on from


def move(
    fabric: syncline.Fabric,
    codec: str,
    collective: str,
    *,
    skipped: int = -1,  # a step in which rank 1 has NaN
    huge: int = -1,  # a step in which each gradient is nearly the largest number
    interrupted: int = -1,  # a step before which all is saved and built anew
    of_hosts: int = 0,  # ranks on each host that this rank stands for
    until: int = len(RATES),
    since: Sequence[tuple[dict, dict]] = (),
    dtype: torch.dtype = torch.float32,
) -> Moved:
    """Make a step for each of the learning rates."""
    model, optimizer, sync = build(fabric, codec, collective, dtype)
    if since:
        model.load_state_dict(since[fabric.rank][0])
        sync.load_state_dict(since[fabric.rank][1])
    for step in range(4 if since else 0, until):
        if step == interrupted:
            saved = copy.deepcopy((model.state_dict(), sync.state_dict()))
            sync.close()
            model, optimizer, sync = build(fabric, codec, collective, dtype)
            model.load_state_dict(saved[0])
            sync.load_state_dict(saved[1])
        slopes = means_of_hosts(step, fabric.rank, of_hosts) if of_hosts else slopes_of(step, fabric.rank)
        if step == skipped and fabric.rank == 1:
            slopes[0][3, 3] = float("nan")
        if step == huge:
            slopes[0].fill_(3e38)
        one_step(model, optimizer, slopes, RATES[step])
    saved = copy.deepcopy((model.state_dict(), sync.state_dict()))
    codec_state = saved[1].get("codec_state") or {"residual": {}, "state": {}}
    kept = [value * codec_state["step_scale"][name] for name, value in by_parameter(model, codec_state["residual"])]
    moved = [-p.detach().flatten() for p in model.parameters()]
    return Moved(moved, kept, codec_state["state"], sync.report().sent_bytes, saved)


def build(
    fabric: syncline.Fabric, codec: str, collective: str, dtype: torch.dtype
) -> tuple[nn.Module, torch.optim.Optimizer, syncline.Sync]:
    model = Steep().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0])
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, collective=collective, check_every=2, **SMALL)
    return model, optimizer, sync


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, slopes: list[Tensor], rate: float) -> None:
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    model(slopes).backward()
    optimizer.step()


def by_parameter(model: nn.Module, kept: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(name, kept[name]) for name, _ in model.named_parameters() if name in kept]


def move_with_all(fabric: syncline.Fabric, codecs: Sequence[str], collective: str) -> list[list[Tensor]]:
    return [move(fabric, codec, collective).moved for codec in codecs]


def take(fabric: syncline.Fabric, codec: str, states: list[dict]) -> dict[str, Any]:
    """What a rank has after it was given the states of other ones."""
    _, _, sync = build(fabric, codec, "hierarchical", torch.float32)
    sync.load_state_dict(states)
    path = sync.reducer.path
    for bucket in sync.reducer.layout.buckets:
        path.stages.state_of(bucket)
    return path.state_dict()


def sampled(fabric: syncline.Fabric, codec: str) -> list[float]:
    """How much was left out, in as many steps as it takes to have a sample."""
    model, optimizer, sync = build(fabric, codec, "hierarchical", torch.float32)
    for step in range(quality.EVERY + 1):
        one_step(model, optimizer, slopes_of(step, fabric.rank), 0.1)
    return [sample.relative_error for sample in sync.quality()]


# Failures and endings


def move_with_a_victim(
    fabric: syncline.Fabric, victim: int, strike: Callable[[], None], folder: str
) -> tuple[str, int | None, float]:
    """Two steps together, and a third without the victim: how that ends."""
    model, optimizer, _ = build(fabric, "topk:0.1", "hierarchical:sizes=1+3", torch.float32)
    for step in range(2):
        one_step(model, optimizer, slopes_of(step, fabric.rank), 0.1)
    if fabric.rank == victim:
        strike()
    outcome = outcome_and_error(lambda: one_step(model, optimizer, slopes_of(2, fabric.rank), 0.1))
    report_and_stay(fabric, folder)
    return outcome


def make_and_close(fabric: syncline.Fabric) -> tuple[int, int]:
    """How many more descriptors and threads there are after three more have come and gone."""
    train_and_close(fabric)
    before = at_rest()
    for _ in range(3):
        train_and_close(fabric)
    return left_since(before)


def train_and_close(fabric: syncline.Fabric) -> None:
    model, optimizer, sync = build(fabric, "topk:0.1", "hierarchical:sizes=2+2", torch.float32)
    one_step(model, optimizer, slopes_of(0, fabric.rank), 0.1)
    sync.close()
    del model, optimizer, sync
    gc.collect()  # gradients are views of memory that is shared, and hooks go round in circles
    fabric.barrier()
