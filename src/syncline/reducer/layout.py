"""Which parameters are watched, and the buckets of the plan that is in force.

The first plan only observes: buckets are made for the order in which gradients came on rank 0. Parameters that begin to
need a gradient later get buckets of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.core.plan import Gradient, Plan, assign
from syncline.fabric.base import Fabric
from syncline.guards.trainable import refuse_dtype
from syncline.path.bucket import Bucket, Slot
from syncline.reducer.heap import keep_freed_memory
from syncline.reducer.parameters import Named

CameHook = Callable[[Slot], None]


class Layout:
    """The slots and buckets of one model."""

    def __init__(
        self,
        fabric: Fabric,
        sparse_names: set[str],
        plan: Plan,
        buffers: int,
        came: CameHook,
        comes: CameHook | None,
        unfrozen: Callable[[], None],
        divisor_of: Callable[[torch.dtype], int],
        fixed: bool = False,
    ) -> None:
        """`fixed`: buckets are those of the order of registration, which needs no agreement."""
        self.fabric = fabric
        self.sparse_names = sparse_names
        self.plan = plan
        self.buffers = buffers  # of each bucket
        self.fixed = fixed
        self.came = came  # told whenever a gradient has been accumulated
        self.comes = comes  # told before that
        self.unfrozen_came = unfrozen  # told of the first gradients of parameters that needed none before
        self.divisor_of = divisor_of  # of gradients on their way into a bucket
        self.frozen: dict[str, nn.Parameter] = {}
        self.slots: list[Slot] = []
        self.sparse: list[Slot] = []
        self.buckets: list[Bucket] = []
        self.hooks: list[GradientHook] = []
        self.frozen_hooks: dict[str, GradientHook] = {}

    def watch_all(self, named: Named) -> None:
        """Watch parameters; those that need no gradient are looked at again at the end of each pass."""
        for name, parameter in named:
            if not parameter.requires_grad:
                self.frozen[name] = parameter
                if parameter.is_floating_point() or parameter.is_complex():
                    self.frozen_hooks[name] = GradientHook(parameter, self.unfrozen_came)
        self.watch((name, parameter) for name, parameter in named if name not in self.frozen)

    def watch(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[Slot]:
        """Be told of all gradients of parameters; those that will be in buckets."""
        watched: list[Slot] = []
        for name, parameter in named:
            slot = Slot(name, parameter, name in self.sparse_names)
            (self.sparse if slot.is_sparse else watched).append(slot)
            before = None if self.comes is None else partial(self.comes, slot)
            self.hooks.append(GradientHook(parameter, partial(self.came, slot), before))
        self.slots += watched
        return watched

    @property
    def is_made(self) -> bool:
        """Whether there are buckets."""
        return not self.plan.observes

    def planned_names(self) -> list[list[str]]:
        """Parameters in each bucket, as it is or as it would be if gradients came in reverse order of registration."""
        plan = self.plan if self.is_made else self.plan.bucketed(gradients_of(self.slots[::-1]))
        return [list(names) for names in plan.buckets or ()]

    def make_buckets(self, order: Sequence[Slot]) -> None:
        """After the first pass: in the order in which gradients came on rank 0; those that did not come are last."""
        last = {slot: position for position, slot in enumerate(order)}
        number = {slot: position for position, slot in enumerate(self.slots)}
        if self.fixed:
            self.adopt(self.plan.bucketed(gradients_of(self.slots[::-1])))
            return
        ranked = sorted(self.slots, key=lambda slot: (last.get(slot, len(order)), -number[slot]))
        agreed = torch.tensor([number[slot] for slot in ranked], device=self.fabric.device)
        self.fabric.broadcast(agreed)
        self.adopt(self.plan.bucketed(gradients_of([self.slots[position] for position in agreed.tolist()])))

    def adopt(self, plan: Plan) -> None:
        """Make the buckets of a plan that has those of the plan before, and maybe more."""
        by_name = {slot.name: slot for slot in self.slots}
        groups = [[by_name[name] for name in names] for names in (plan.buckets or ())[len(self.buckets) :]]
        self.plan = plan
        for group in groups:
            divisor = self.divisor_of(group[0].parameter.dtype)
            self.buckets.append(Bucket(self.fabric, len(self.buckets), group, self.buffers, divisor=divisor))
        if self.fabric.device.type == "cpu":
            keep_freed_memory(max((slot.parameter.nbytes for group in groups for slot in group), default=0))

    def unfrozen(self) -> list[str]:
        """Parameters that need a gradient by now and are not watched yet."""
        return [name for name, parameter in self.frozen.items() if parameter.requires_grad]

    def adopt_unfrozen(self, names: Sequence[str]) -> None:
        """Watch these as well; they get buckets of their own."""
        for name in names:
            refuse_dtype(name, self.frozen[name])
        for name in names:
            self.frozen_hooks.pop(name).remove()
        slots = self.watch([(name, self.frozen.pop(name)) for name in names])
        self.adopt(self.plan.extended(gradients_of(slots[::-1])))

    def turn_for(self, number: int) -> None:
        """Let gradients go to the memory of this pass."""
        for bucket in self.buckets:
            bucket.turn_for(number)

    @torch.no_grad()
    def copy_in(self, means: Mapping[str, Tensor]) -> None:
        """Put means from elsewhere in the memory of this pass."""
        for bucket in self.buckets:
            bucket.buffer.values.zero_()
            for slot in bucket.slots:
                if slot.name in means:
                    slot.view.copy_(means[slot.name])

    def slots_of(self, optimizer: Optimizer) -> list[Slot]:
        """Those of the parameters that an optimizer has."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [slot for slot in self.slots if id(slot.parameter) in own]

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self.buckets:
            bucket.buffer.values.mul_(factor)
            bucket.buffer.finite = None
        for slot in self.sparse:
            if slot.parameter.grad is not None:
                slot.parameter.grad.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """The buckets by parameter names, their sizes, and how many gradients each parameter receives in a pass."""
        return {
            "bucket_bytes": [self.plan.first_bucket_bytes, self.plan.bucket_bytes],
            "buckets": [list(names) for names in self.plan.buckets or ()],
            "expected": {slot.name: slot.expected for slot in self.slots},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Adopt the plan that there was, so that what follows has the same bits; with other sizes, for its order."""
        if self.is_made or not saved["buckets"]:
            return
        by_name = {slot.name: slot for slot in self.slots}
        was = replace(self.plan, buckets=tuple(map(tuple, saved["buckets"])))
        if set(by_name) != set(was.order):
            return  # other parameters need a gradient now: the next pass makes new buckets
        for name, times in saved["expected"].items():
            by_name[name].expected = times
        is_same = saved["bucket_bytes"] == [self.plan.first_bucket_bytes, self.plan.bucket_bytes]
        self.adopt(was if is_same else self.plan.bucketed(gradients_of([by_name[name] for name in was.order])))

    def close(self) -> None:
        """Stop watching."""
        for hook in [*self.hooks, *self.frozen_hooks.values()]:
            hook.remove()
        self.hooks.clear()
        self.frozen_hooks.clear()


class GradientHook:
    """Calls something when a gradient of a parameter has been accumulated and all its own hooks have seen it.

    A hook of the node that accumulates comes after the post-accumulate hooks of the parameter, whenever those were set.
    The node lives as long as somebody holds it, and is another one after `parameter.data` has got another type: then
    the gradient is found at the end of the pass.
    """

    def __init__(
        self, parameter: nn.Parameter, call: Callable[[], None], before: Callable[[], None] | None = None
    ) -> None:
        """`before` is called before the gradient is accumulated."""
        is_needed = parameter.requires_grad
        parameter.requires_grad_(True)
        with torch.enable_grad():
            grad_fn: Any = parameter.expand_as(parameter).grad_fn
            self.node = grad_fn.next_functions[0][0]
        parameter.requires_grad_(is_needed)
        self.handles = [self.node.register_hook(lambda *_: call())]
        if before is not None:
            self.handles.append(self.node.register_prehook(lambda *_: before()))

    def remove(self) -> None:
        """Stop calling."""
        for handle in self.handles:
            handle.remove()


def gradients_of(slots: Iterable[Slot]) -> list[Gradient]:
    """What a plan has to know of the gradients of parameters."""
    kinds = ((slot, (slot.parameter.dtype, slot.parameter.device)) for slot in slots)
    return [Gradient(slot.name, slot.parameter.nbytes, kind) for slot, kind in kinds]


def group_slots(slots: Sequence[Slot], first_bucket_bytes: int, bucket_bytes: int) -> list[list[Slot]]:
    """Slots by bucket: one dtype and one device each."""
    by_name = {slot.name: slot for slot in slots}
    groups = assign(gradients_of(slots), first_bucket_bytes, bucket_bytes)
    return [[by_name[name] for name in names] for names in groups]
