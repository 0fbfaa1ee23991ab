"""Changes of parameters and optimizer state outside the optimizer's step, seen by the versions of tensors.

Torch counts the changes of a tensor in place, and loading weights is one of them. Reading a version takes some 30 ns,
so all parameters are watched, and an even sample of the optimizer's tensors. What is written through `.data` does not
count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

WATCHED_STATE = 256  # tensors of optimizers, at most
FIND_EVERY = 64  # passes after which tensors are looked up again
FIRST_PASSES = (2, 3)  # in which it shows whether an optimizer replaces its tensors
version_of = attrgetter("_version")


class Outside(NamedTuple):
    """What has happened to a replica outside the optimizer's step."""

    changes: int = 0  # of tensors, in place
    loads: int = 0  # of optimizer state, which is in other tensors from then on


NOTHING = Outside()


class Changes:
    """Counts what happens to a replica outside the optimizer's step."""

    def __init__(
        self, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer], find_state: Callable[[], list[Tensor]]
    ) -> None:
        """`find_state` looks up the tensors of optimizers, in an order that all ranks have."""
        self.parameters = list(parameters)
        self.optimizers = optimizers
        self.find_state = find_state
        self.tensors: list[Tensor] = []  # parameters and all optimizer state
        self.watched: list[Tensor] = []
        self.entries = 0  # in the states of optimizers
        self.versions = 0  # of all that is watched, added up
        self.outside = NOTHING  # what was not taken yet
        self.in_step = False
        self.renews = False  # an optimizer makes new tensors in its step, so the old ones are not kept alive here
        self.find_tensors()
        if self.entries:  # before the first pass: maybe loaded, and maybe by one rank only
            self.outside = Outside(loads=1)
        self.hooks = [optimizer.register_load_state_dict_post_hook(self.loaded) for optimizer in optimizers]

    # Which tensors there are

    def find_tensors(self) -> bool:
        """Take note of the tensors that there are now; whether they are others. If not, the list is the same one."""
        found = [*self.parameters, *self.find_state()]
        is_new = len(found) != len(self.tensors) or not all(map(is_, found, self.tensors))
        if is_new:
            self.hold(found)
        self.entries = self.count_entries()
        self.versions = self.count_versions()
        return is_new

    def hold(self, tensors: list[Tensor]) -> None:
        """Watch these: the parameters, and what comes after them."""
        self.tensors = tensors
        state = tensors[len(self.parameters) :]
        sample = state[:: -(-len(state) // WATCHED_STATE)] if state else []
        self.watched = [tensor for tensor in (*self.parameters, *sample) if not tensor.is_inference()]

    def find_replaced(self, number: int) -> None:
        """Look up tensors again in some passes: an optimizer may have replaced some of them in its step."""
        if self.renews or number % FIND_EVERY == 0 or number in FIRST_PASSES:
            self.look()
            had_state = len(self.tensors) > len(self.parameters)
            self.renews = (self.find_tensors() and had_state) or self.renews

    def count_entries(self) -> int:
        """More or fewer when an optimizer's state gets its first tensors, or loses some."""
        return sum(len(one.state) + sum(map(len, one.state.values())) for one in self.optimizers)

    def count_versions(self) -> int:
        """A sum that grows with every change."""
        return sum(map(version_of, self.watched))

    # What happens to them

    def look(self) -> None:
        """Count what has happened since this was last called, or since the last step."""
        if self.in_step:
            return
        now = self.count_versions()
        self.outside = Outside(self.outside.changes + now - self.versions, self.outside.loads)
        self.versions = now
        if self.count_entries() != self.entries:
            self.note_load()

    def loaded(self, _: Optimizer) -> None:
        """An optimizer has loaded a state."""
        self.look()
        self.note_load()

    def note_load(self) -> None:
        """The state of an optimizer is in other tensors now."""
        self.outside = Outside(self.outside.changes, self.outside.loads + 1)
        self.find_tensors()

    def begin_step(self) -> None:
        """What changes from here on is changed by the optimizer, be it in the several passes of a closure."""
        self.look()
        self.in_step = True
        if self.renews:
            self.hold(self.parameters)

    def end_step(self) -> None:
        """Changes count again from here on."""
        self.in_step = False
        if self.count_entries() != self.entries:
            self.find_tensors()
        else:
            self.versions = self.count_versions()

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
