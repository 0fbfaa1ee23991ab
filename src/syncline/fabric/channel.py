"""A channel: collectives in an order that all ranks keep. Each only starts, and returns a handle that is waited for.

Nothing is compared before data moves, as it is in the calls that a user makes on a fabric: sizes and order follow from
a plan that ranks have compared, and the status of a pass says whether all were in the same one. A message of a gather
or of an exchange has the same length on all ranks: those that are shorter are filled up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from time import monotonic_ns

from torch import Tensor

from syncline.collectives.execute import Op
from syncline.fabric.calls import collective_text, describe
from syncline.fabric.executor import Executor
from syncline.fabric.handle import Handle, Times
from syncline.fabric.transport import MessageTransport, Transport


class Channel(ABC):
    """The calls of one order, over a transport that makes no other calls while these are under way."""

    def __init__(self, transport: Transport, open_channel: Callable[[str], Channel]) -> None:
        self.transport = transport
        self.open_channel = open_channel  # another channel between the same ranks, under a name
        self.rank = transport.rank
        self.world = transport.world
        self.device = transport.device
        self.started: Counter[str] = Counter()  # calls by kind

    def all_reduce(self, tensor: Tensor, op: Op, collective: str) -> Handle:
        """Replace a flat tensor on every rank by the sum or mean over ranks."""
        self.started["all_reduce"] += 1
        return self._all_reduce(tensor, op, collective_text(self.transport, collective, tensor))

    def all_gather(self, gathered: Tensor, own: Tensor) -> Handle:
        """Fill the rows of `gathered` with what every rank has, all of one length."""
        self.started["all_gather"] += 1
        return self._all_gather(gathered, own)

    def exchange(self, taken: Tensor, parts: Tensor) -> Handle:
        """Row i of `taken` becomes what rank i has in the row of its `parts` that is this rank's; all of one length."""
        self.started["exchange"] += 1
        return self._exchange(taken, parts)

    def prepare_means_of_halves(self) -> None:
        """Make ready, on all ranks together, for means of 16-bit values that go straight to their owners."""

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> Handle: ...

    @abstractmethod
    def _all_gather(self, gathered: Tensor, own: Tensor) -> Handle: ...

    @abstractmethod
    def _exchange(self, taken: Tensor, parts: Tensor) -> Handle: ...


class MessageChannel(Channel):
    """Collectives along their schedules, carried out by the thread of a transport that moves messages."""

    transport: MessageTransport

    def __init__(self, transport: MessageTransport, open_channel: Callable[[str], Channel]) -> None:
        super().__init__(transport, open_channel)
        self.executor = Executor(transport)

    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> Handle:
        call = describe("all_reduce", op, tensor, collective)
        return self._run(call, lambda: self.executor.all_reduce(tensor, op, collective))

    def _all_gather(self, gathered: Tensor, own: Tensor) -> Handle:
        gathered[self.rank] = own
        return self._run(describe("all_gather", "copy", own), lambda: self.executor.all_gather(gathered.view(-1)))

    def _exchange(self, taken: Tensor, parts: Tensor) -> Handle:
        call = describe("all_to_all", "copy", parts)
        return self._run(call, lambda: self.executor.all_to_all(taken.view(-1), parts.view(-1)))

    def _run(self, call: str, work: Callable[[], object]) -> Handle:
        """Carry out a call in its turn."""

        def timed() -> Times:
            began_ns = monotonic_ns()
            self.transport.begin_call(call)
            work()
            return Times(began_ns, began_ns, monotonic_ns())

        return self.transport.thread.submit(timed, call, self.transport.deadlines.operation)
