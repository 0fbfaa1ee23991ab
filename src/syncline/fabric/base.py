"""Fabric: what users, modules and backends hold of the ranks that they talk to. It is made of parts.

    transport    how bytes move between the ranks of a group, and the collectives over that
    health       transport.health: progress of ranks, deaths and who is to blame, abort
    channels     collectives that only start, for what is inside the library
    membership   rejoining, where a new process may take the place of one that died

A call is checked here and carried out by the transport, with messages along a schedule or in memory that all ranks
share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from syncline.collectives.execute import Op, Pending
from syncline.collectives.flat import Algorithm
from syncline.errors import ConfigError, FabricClosed
from syncline.fabric.calls import Calls, check, check_rank, collective_text, flat_view
from syncline.fabric.handle import Handle
from syncline.fabric.transport import Transport

if TYPE_CHECKING:
    from syncline.fabric.channel import Channel
    from syncline.fabric.membership import Membership


class Fabric:
    """The ranks of a group, and what they can do together."""

    def __init__(
        self, transport: Transport, engine: Fabric | None = None, membership: Membership | None = None, path: str = ""
    ) -> None:
        """`engine`: where `collective="engine"` goes that this transport has not; it is closed with this fabric."""
        self.transport = transport
        self.name = transport.name
        self.rank, self.world, self.hosts = transport.rank, transport.world, transport.group.hosts
        self.device = transport.device
        self.deadlines = transport.deadlines
        self.birthplace = transport.birthplace
        self.health = transport.health
        self.incarnation = transport.incarnation  # how many processes had this rank before; 0 is the first start
        self.has_engine = transport.has_engine
        self.engine = engine
        self.membership = membership
        self.path = path  # which subgroup of which subgroup this is
        self.children: list[Fabric] = []  # what was made from this fabric, and is closed with it
        self.made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.is_closed = False
        self.in_join = False  # a `Sync` on it is, which shadows one model alone
        self.before_close: list[Callable[[bool], None]] = []  # of whoever works with this fabric, told of `drain`
        self.at_close: list[Callable[[], None]] = []  # the same, when nothing is under way any more

    @property
    def outlived(self) -> bool:
        """Whether the process group that this fabric was made over is no longer one."""
        return self.transport.outlived or (self.engine is not None and self.engine.outlived)

    @cached_property
    def calls(self) -> Calls:
        """What users call, carried out by the transport."""
        return self.transport.calls()

    def subgroup(self, ranks: Sequence[int] | None = None) -> Fabric:
        """A fabric between some ranks of this one: rank 0 of it is the first of `ranks`, and so on.

            if fabric.rank in (1, 3):
                pair = fabric.subgroup([1, 3])
            everyone = fabric.subgroup()

        Only its members make it, all with the same `ranks`; the same ranks again give another fabric. Neither making it
        nor its calls need a common order with the calls of this one, and it fails by itself: when a rank dies or
        stalls, this fabric and the subgroups with that rank are broken, and the others go on. Its errors count ranks as
        it does. It is closed with the fabric it was made from.
        """
        return self._connect("subgroup", range(self.world) if ranks is None else ranks)

    def channel(self, name: str = "", ranks: Sequence[int] | None = None) -> Channel:
        """Collectives between some ranks that only start and are not compared, in one order.

        Without a name the order is that of this fabric's own calls too. All ranks make channels in the same order.
        """
        if name:
            return self._connect(name, range(self.world) if ranks is None else ranks).channel()
        self.birthplace.require()
        return self.transport.channel(self.channel)

    def abort(self, why: str) -> None:
        """End what is under way, and all that comes, here and on the other ranks; `why` is what they are told."""
        if self.birthplace.is_here() and not self.is_closed:
            self.health.abort(f"rank {self.rank} {why}")
            for one in self._belonging():
                one.abort(why)

    def with_engine(self) -> Fabric:
        """The fabric that can hand tensors to an engine's own all-reduce."""
        if self.has_engine:
            return self
        if self.engine is None:
            raise ConfigError(
                f'collective="engine" needs a process group, and the {self.name} fabric has none: use "auto", or start '
                f"with torchrun"
            )
        return self.engine

    def close(self, drain: bool = True) -> None:
        """Give back what this rank holds. Safe to call twice.

        With `drain` it waits for what was started; otherwise what is under way fails, here and on the other ranks. In a
        forked child all of it is the parent's, and is left alone.
        """
        if not self.birthplace.is_here():
            return
        self.finish(drain)
        for child in [*self.children]:
            child.close(drain)
        self.is_closed = True
        self.transport.close(drain)
        if self.engine is not None:
            self.engine.close(drain)
        while self.at_close:
            self.at_close.pop()()

    def finish(self, drain: bool = True) -> None:
        """Let whoever works with this fabric and its children come to an end, which with `drain` is an orderly one."""
        while self.before_close and self.birthplace.is_here():
            self.before_close.pop()(drain)
        for child in [*self.children]:
            child.finish(drain)

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A zeroed flat tensor, in memory that peers can reach where there is such a thing."""
        return self.transport.buffer(numel, dtype)

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start sending; the tensor may be changed again after `wait`."""
        return self.transport.post([(flat_view(tensor), check_rank(to, self.world))], [])

    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Start receiving a tensor of the same size and dtype; it may be read after `wait`."""
        return self.transport.post([], [(flat_view(tensor), check_rank(source, self.world))])

    def all_reduce(self, tensor: Tensor, op: Op = "sum", collective: str | Algorithm = "auto") -> Tensor:
        """Replace `tensor` on every rank by the sum, mean or maximum over ranks; the same bits everywhere.

        `collective` is an algorithm (`"ring"`, `"tree:arity=4"`, `Ring()`), `"engine"` for the engine's own where there
        is an engine, or `"auto"`. Integers are divided towards zero by `op="mean"`.
        """
        check(self.transport, tensor, op)
        text = collective_text(self.transport, collective, tensor)
        if text == "engine" and not self.has_engine:
            return self.with_engine().all_reduce(tensor, op, text)
        self.calls.all_reduce(tensor, op, text)
        return tensor

    def all_reduce_async(self, tensor: Tensor, op: Op = "sum", collective: str | Algorithm = "auto") -> Handle:
        """Start an all-reduce and return at once. Calls take effect in the order in which they were made.

        The tensor belongs to the call until `wait` has returned.
        """
        check(self.transport, tensor, op)
        text = collective_text(self.transport, collective, tensor)
        if text == "engine" and not self.has_engine:
            raise ConfigError('collective="engine" cannot be started asynchronously here; use "auto"')
        return self.calls.start_all_reduce(tensor, op, text)

    def reduce_scatter(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """This rank's slice of the flat sum, mean or maximum: ceil(n / W) elements, fewer at the end."""
        check(self.transport, tensor, op)
        return self.calls.reduce_scatter(tensor, op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Everyone's tensor, stacked in order of rank."""
        check(self.transport, tensor)
        return self.calls.all_gather(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Replace `tensor` on every rank by that of `root`."""
        check(self.transport, tensor)
        flat = tensor.detach().contiguous().view(-1)
        self.calls.broadcast(flat, check_rank(root, self.world))
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))
        return tensor

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Part i of the result is what rank i had as part `rank`; a tensor is cut into W equal parts."""
        check(self.transport, tensor)
        if tensor.numel() % self.world:
            raise ConfigError(
                f"{tensor.numel()} elements do not divide into {self.world} equal parts; "
                f"pad to {-(-tensor.numel() // self.world) * self.world}"
            )
        return self.calls.all_to_all(tensor.detach().contiguous().view(-1)).view(tensor.shape)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.calls.barrier()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    def _belonging(self) -> list[Fabric]:
        """The fabrics that end with this one."""
        return [*self.children, *([self.engine] if self.engine is not None else [])]

    def _connect(self, kind: str, ranks: Sequence[int]) -> Fabric:
        """A fabric between some ranks with an order of calls of its own, closed with this one."""
        self.birthplace.require()
        members = self._members(ranks)
        name = f"{kind} {self.made[kind, members]}"
        self.made[kind, members] += 1
        is_all = members == tuple(range(self.world))
        made = Fabric(
            self.transport.connect(members, name),
            membership=self.membership if is_all else None,
            path=f"{self.path}/{name}",
        )
        self.children.append(made)
        made.at_close.append(lambda: self.children.remove(made) if made in self.children else None)
        return made

    def _members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The ranks of a group that this rank may make."""
        members = tuple(int(check_rank(rank, self.world)) for rank in ranks)
        if self.is_closed:
            raise FabricClosed("the fabric is closed, so it has no subgroups; make a new one")
        if len(set(members)) < len(members):
            raise ConfigError(f"ranks={[*members]} has a rank twice; use {[*dict.fromkeys(members)]}")
        if self.rank not in members:
            raise ConfigError(
                f"rank {self.rank} is not in ranks={[*members]}, and only members make a subgroup; "
                f"ask first: if fabric.rank in ranks"
            )
        return members
