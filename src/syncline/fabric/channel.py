"""A channel: collectives in an order that all ranks keep. Each only starts, and what it returns is waited for.

Nothing is compared before data moves, as it is in the calls that a user makes on a fabric: sizes and order follow from
a plan that ranks have compared, and the status of a pass says whether all were in the same one. A message of a gather
or of an exchange has the same length on all ranks: those that are shorter are filled up.

Aborting ends what is under way on all ranks, and everything that comes after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from time import monotonic_ns
from typing import TYPE_CHECKING

from torch import Tensor

from syncline.collectives.execute import Op
from syncline.fabric.base import Fabric, Handle, Times, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncline.fabric.messages import MessageFabric


class Channel(ABC):
    """The calls of one order, between the ranks of a fabric that makes no other calls while these are under way."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.started: Counter[str] = Counter()  # calls by kind

    def all_reduce(self, tensor: Tensor, op: Op, collective: str) -> Handle:
        """Replace a flat tensor on every rank by the sum or mean over ranks."""
        self.started["all_reduce"] += 1
        return self._all_reduce(tensor, op, self.fabric._collective(collective, tensor))

    def all_gather(self, gathered: Tensor, own: Tensor) -> Handle:
        """Fill the rows of `gathered` with what every rank has, all of one length."""
        self.started["all_gather"] += 1
        return self._all_gather(gathered, own)

    def exchange(self, taken: Tensor, parts: Tensor) -> Handle:
        """Row i of `taken` becomes what rank i has in the row of its `parts` that is this rank's; all of one length."""
        self.started["exchange"] += 1
        return self._exchange(taken, parts)

    def abort(self, why: str) -> None:
        """End what is under way, and all that comes, here and on the other ranks."""
        self.fabric.abort(why)

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> Handle: ...

    @abstractmethod
    def _all_gather(self, gathered: Tensor, own: Tensor) -> Handle: ...

    @abstractmethod
    def _exchange(self, taken: Tensor, parts: Tensor) -> Handle: ...


class MessageChannel(Channel):
    """Collectives along their schedules, carried out by the thread of a fabric that moves messages."""

    fabric: MessageFabric

    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> Handle:
        call = describe("all_reduce", op, tensor, collective)
        return self._run(call, lambda: self.fabric.reduce_along(tensor, op, collective))

    def _all_gather(self, gathered: Tensor, own: Tensor) -> Handle:
        gathered[self.fabric.rank] = own
        return self._run(describe("all_gather", "copy", own), lambda: self.fabric.gather_along(gathered.view(-1)))

    def _exchange(self, taken: Tensor, parts: Tensor) -> Handle:
        call = describe("all_to_all", "copy", parts)
        return self._run(call, lambda: self.fabric.exchange_along(taken.view(-1), parts.view(-1)))

    def _run(self, call: str, work: Callable[[], object]) -> Handle:
        """Carry out a call in its turn."""

        def timed() -> Times:
            began_ns = monotonic_ns()
            self.fabric.begin_call(call)
            work()
            return Times(began_ns, began_ns, monotonic_ns())

        return self.fabric.worker.submit(timed, call, self.fabric.deadlines.operation)
