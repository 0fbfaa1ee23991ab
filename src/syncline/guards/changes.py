"""Changes of parameters and optimizer state outside the optimizer's step: loads, and changes in place.

Loads are seen by hooks, and changes in place by the versions that torch gives tensors, from the end of a step to the
next pass. To read one takes some 100 ns, because it is in nobody's cache. Where tensors are so many and so small that
this would weigh, a sample is watched, another one after every step. What is written through `.data` has no version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.core.torch_internals import version_of
from syncline.guards.loads import Named, watch_loads

FEWEST_PARAMETERS, FEWEST_STATE = 48, 16  # tensors that are watched at a time, or all
WORTH_BYTES = 256 * 1024  # of tensors, for each one more: a step takes longer with them
FIND_EVERY = 1000  # passes after which tensors are looked up again
FIRST_PASSES = (2, 3)  # in which it shows whether an optimizer replaces its tensors


class Outside(NamedTuple):
    """What has happened to a replica outside the optimizer's step."""

    changes: int = 0  # of tensors, in place, as far as they were seen
    loads: int = 0  # by modules and optimizers


NOTHING = Outside()
Samples = list[list[Tensor]]


def samples_of(tensors: Sequence[Tensor], fewest: int) -> Samples:
    """Tensors that have a version, dealt out to samples; the same on all ranks."""
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    most = max(fewest, sum(tensor.nbytes for tensor in counted) // WORTH_BYTES)
    number = -(-len(counted) // most)
    return [counted[first::number] for first in range(number)]


class Changes:
    """Counts what happens to a replica outside the optimizer's step."""

    def __init__(
        self, model: nn.Module, named: Named, optimizers: Sequence[Optimizer], find_state: Callable[[], list[Tensor]]
    ) -> None:
        """`find_state` looks up the tensors of optimizers, in an order that all ranks have."""
        self.parameters = [parameter for _, parameter in named]
        self.optimizers = optimizers
        self.find_state = find_state
        self.tensors: list[Tensor] = []  # parameters and all optimizer state
        self.samples: tuple[Samples, Samples] = ([], [])  # of parameters and of state
        self.watched: list[Tensor] = []  # one sample of each
        self.turn = 0  # of the samples: the number of the last pass
        self.entries = 0  # in the states of optimizers
        self.versions = 0  # of what is watched, added up
        self.outside = NOTHING  # what was not taken yet
        self.in_step = False
        self.renews = False  # an optimizer makes new tensors in its step, so the old ones are not kept alive here
        self.find_tensors()
        if self.entries:  # before the first pass: maybe loaded, and maybe by one rank only
            self.outside = Outside(loads=1)
        self.hooks = watch_loads(model, named, lambda _: self.note_load())
        self.hooks += [optimizer.register_load_state_dict_post_hook(self.state_loaded) for optimizer in optimizers]

    # Which tensors there are

    def find_tensors(self) -> bool:
        """Take note of the tensors that there are now; whether they are others. If not, the list is the same one."""
        found = [*self.parameters, *(one for one in self.find_state() if one.layout == torch.strided)]
        is_new = len(found) != len(self.tensors) or not all(map(is_, found, self.tensors))
        if is_new:
            self.tensors = found
            state = found[len(self.parameters) :]
            self.samples = samples_of(self.parameters, FEWEST_PARAMETERS), samples_of(state, FEWEST_STATE)
        self.entries = self.count_entries()
        self.watch()
        return is_new

    def find_replaced(self, number: int) -> None:
        """Look up tensors again in some passes: an optimizer may have replaced some of them in its step."""
        self.turn = number
        if self.renews or number % FIND_EVERY == 0 or number in FIRST_PASSES:
            self.look()
            had_state = len(self.tensors) > len(self.parameters)
            self.renews = (self.find_tensors() and had_state) or self.renews

    def count_entries(self) -> int:
        """Parameters that optimizers keep something of: others when a state is cleared, or gets its first entries."""
        return sum(len(one.state) for one in self.optimizers)

    def watch(self) -> None:
        """Watch the next sample from here on, the same on all ranks."""
        self.watched = [tensor for samples in self.samples if samples for tensor in samples[self.turn % len(samples)]]
        self.versions = sum(map(version_of, self.watched))

    # What happens to them

    def look(self) -> None:
        """Count what has happened since this was last called, or since the last step."""
        if self.in_step:
            return
        now = sum(map(version_of, self.watched))
        self.outside = Outside(self.outside.changes + now - self.versions, self.outside.loads)
        self.versions = now
        if self.count_entries() != self.entries:
            self.note_load()
            self.find_tensors()

    def note_load(self) -> None:
        """A module or an optimizer has loaded something, or an optimizer was cleared."""
        self.outside = Outside(self.outside.changes, self.outside.loads + 1)

    def state_loaded(self, _: Optimizer) -> None:
        """An optimizer has loaded a state, which is in other tensors from here on."""
        self.look()
        self.note_load()
        self.find_tensors()

    def begin_step(self) -> None:
        """What changes from here on is changed by the optimizer, be it in the several passes of a closure."""
        self.in_step = True
        if self.renews:
            self.tensors, self.samples, self.watched = self.parameters, ([], []), []

    def end_step(self) -> None:
        """Changes count again from here on."""
        self.in_step = False
        if self.count_entries() != self.entries:
            self.find_tensors()
        else:
            self.watch()

    def take(self) -> Outside:
        """What has happened since this was last called."""
        self.look()
        taken, self.outside = self.outside, NOTHING
        return taken

    def accept(self) -> None:
        """All ranks have been made equal."""
        self.find_tensors()
        self.outside = NOTHING

    def close(self) -> None:
        """Stop watching."""
        for hook in self.hooks:
            hook.remove()
