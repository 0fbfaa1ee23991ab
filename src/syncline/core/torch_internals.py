"""All that Syncline uses of torch without torch promising it. Nothing else here touches what torch keeps private.

| what | for what | where a torch has it no longer |
|---|---|---|
| which backward pass is under way, a callback at its end | when it begins, ends, fails | an error at import |
| a process group under a name of ours, all there are | channels between any ranks, at any time | an error at import |
| an all-gather into one tensor, with a deadline | what codecs send | an error at import |
| hooks behind a step, and whether there was one | a step made elsewhere, or by nobody | an error at import |
| the version of a tensor | whether somebody has changed it in place | an error at import |
| how many tensors share a storage | whether somebody holds a gradient | a warning what to clone |
| one call on several tensors | speed | one call each |
| the class of all batch norms | which modules to convert | an error at import |
| zeros that have no memory | a gradient that has none is not copied from there | there are none |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.optim import Optimizer

__all__ = [
    "AnyBatchNorm",
    "copy_each",
    "count_tensors",
    "counts_tensors",
    "current_graph_task",
    "current_node",
    "divide_each",
    "has_buffers",
    "has_no_memory",
    "hooks_after_step",
    "live_groups",
    "multiply_each",
    "new_group",
    "norm_of_each",
    "note_stepped",
    "queue_callback",
    "start_gather",
    "version_of",
]

RUN_WITH = "2.13"


def required(owner: Any, name: str) -> Any:
    """What is to be there, or an error that says with which torch it is."""
    if not hasattr(owner, name):
        raise ImportError(
            f"torch {torch.__version__} has no {getattr(owner, '__name__', owner)}.{name}, which Syncline needs; "
            f"it was run with torch {RUN_WITH}: pip install 'torch=={RUN_WITH}.*'"
        )
    return getattr(owner, name)


# Backward passes

current_graph_task: Callable[[], int] = required(torch._C, "_current_graph_task_id")  # -1 outside of a pass
current_node: Callable[[], Any] = required(torch._C, "_current_autograd_node")
queue_callback: Callable[[Callable[[], None]], None] = required(Variable, "_execution_engine").queue_callback

# Tensors

version_of: Callable[[Tensor], int] = attrgetter("_version")
required(torch.empty(0), "_version")
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
counts_tensors = _use_count is not None


def count_tensors(values: Tensor) -> int:
    """Number of tensors on the storage of `values`; always 0 where torch does not tell."""
    return _use_count(values.untyped_storage()._cdata) if _use_count is not None else 0


def _never(tensor: Tensor) -> bool:
    return False


has_no_memory: Callable[[Tensor], bool] = getattr(Tensor, "_is_zerotensor", _never)


def in_turn(one: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A call on many tensors, for a torch that has it for one only; the second of each may be one for all."""

    def all_of(tensors: Sequence[Tensor], others: Any = None) -> list[Any]:
        if others is None:
            return [one(tensor) for tensor in tensors]
        each = others if isinstance(others, Sequence) else [others] * len(tensors)
        return [one(tensor, other) for tensor, other in zip(tensors, each, strict=True)]

    return all_of


copy_each: Callable[..., Any] = getattr(torch, "_foreach_copy_", in_turn(Tensor.copy_))
divide_each: Callable[..., Any] = getattr(torch, "_foreach_div_", in_turn(Tensor.div_))
multiply_each: Callable[..., Any] = getattr(torch, "_foreach_mul_", in_turn(Tensor.mul_))
norm_of_each: Callable[..., Any] = getattr(torch, "_foreach_norm", in_turn(torch.linalg.vector_norm))


# Modules and optimizers


def has_buffers(module: nn.Module) -> bool:
    """Whether there is any buffer by now, found without the names that torch makes on its way through a model."""
    return bool(module._buffers) or any(child is not None and has_buffers(child) for child in module._modules.values())


def hooks_after_step(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Those of one optimizer."""
    return list(required(optimizer, "_optimizer_step_post_hooks").values())


def note_stepped(optimizer: Optimizer) -> None:
    """Let schedulers see that `step` was called; one that does not look elsewhere warns for nothing."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# Process groups

_make_group = required(distributed_c10d, "_new_process_group_helper")
_world = required(distributed_c10d, "_world")
_options_of_gather = required(torch._C._distributed_c10d, "AllgatherOptions")
required(dist.ProcessGroup, "_allgather_base")


def live_groups() -> list[dist.ProcessGroup]:
    """All groups of this process that nobody has destroyed."""
    return [*_world.pg_map]


def new_group(
    store: Store, name: str, members: Sequence[int], rank: int, backend: str, patience: timedelta
) -> dist.ProcessGroup:
    """A group under a name; `members` are ranks of the world, this process the one at `rank` of them.

    `dist.new_group` names a group of some ranks after them and the number of groups that the caller has. Ranks do not
    have that in common, and it comes again when a group was destroyed. So what is behind it is used here.
    """
    group: dist.ProcessGroup
    group, _ = _make_group(len(members), rank, [*members], dist.Backend(backend), store, name, timeout=patience)
    _world.pg_group_ranks[group] = {member: number for number, member in enumerate(members)}
    return group


def start_gather(group: dist.ProcessGroup, gathered: Tensor, own: Tensor, deadline: timedelta) -> dist.Work:
    """Fill `gathered` with what all ranks have, in their order."""
    options = _options_of_gather()
    options.timeout = deadline
    work: dist.Work = group._allgather_base(gathered, own, options)
    return work
