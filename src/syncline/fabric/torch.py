"""Torch: any torch.distributed process group. Gloo is tested here; NCCL and MPI are written to work and untested.

Schedules run over the group's point-to-point calls; `collective="engine"` hands the tensor to its own all-reduce.
When a message fails, ranks attribute the failure through the group's store, so that all of them name the rank that is
to blame and not the neighbour that gave up before them.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from syncline.collectives.execute import HALVES, Op
from syncline.core.group import Group
from syncline.core.torch_internals import start_gather
from syncline.errors import ConfigError, FabricClosed, FabricError, JoinFailed, PeerAborted
from syncline.fabric.abort_watch import AbortWatch
from syncline.fabric.attribution import FailureAttribution
from syncline.fabric.base import Fabric
from syncline.fabric.calls import MessageCalls, check_rank, describe
from syncline.fabric.channel import Channel, MessageChannel
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.divide import divide, mean_of_halves
from syncline.fabric.engine_handle import EngineHandle, InOrder, ScratchMemory
from syncline.fabric.handle import Handle
from syncline.fabric.health import Health, Kind, RankProgress
from syncline.fabric.hosts import host_key
from syncline.fabric.process_groups import close_connections, exists, keeper_of_store, make_group
from syncline.fabric.progress_store import ProgressStore
from syncline.fabric.transport import Messages, MessageTransport

AT_ONCE_BYTES = 128 << 10  # of a message that goes from everyone to everyone: more would meet in the queue of a link
AT_ONCE_RANKS = 16
DRAIN_S = 5.0  # for calls of the engine that all ranks have begun, when a fabric is closed without waiting
BETWEEN_HOSTS_BYTES = 256 << 10  # of a segment: a slow link is kept busy while the owner of a slice adds


class TorchTransport(MessageTransport):
    """One rank of a torch.distributed process group."""

    name = "torch"
    has_engine = True

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        group: Group,
        deadlines: Deadlines,
        owns_group: bool = False,
        parent: TorchTransport | None = None,
    ) -> None:
        """`owns_group`: closing the transport destroys the process group."""
        super().__init__(process_group.rank(), group, deadlines)
        # A world's store keeps its port, and what was said in it, until nobody holds the group that the user destroys.
        self.find_group: Callable[[], dist.ProcessGroup | None] = (
            weakref.ref(process_group) if process_group is dist.group.WORLD else lambda: process_group
        )
        self.backend = dist.get_backend(process_group)
        self.owns_group = owns_group
        self.is_closed = False
        self.group_name = process_group.group_name
        self.nonce = 0  # no other transport over this process group has it
        if self.backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.receives_ahead = False
        if len(group.hosts) > 1:
            self.segment_bytes = BETWEEN_HOSTS_BYTES
        self.health: TorchHealth = TorchHealth(self, parent.health.watch if parent is not None else None)

    @classmethod
    def over(cls, process_group: dist.ProcessGroup, deadlines: Deadlines, owns_group: bool = False) -> TorchTransport:
        """Learn which ranks share a host, and a number that no other transport over this process group has.

        These are the first messages of the process group, so they have the deadline for joining.
        """
        patient = Deadlines(deadlines.join, deadlines.join)
        transport = cls(process_group, Group.on_hosts([0] * process_group.size()), patient, owns_group)
        own = torch.tensor([host_key(), secrets.randbits(62)], device=transport.device)
        told = transport.calls().all_gather(own).tolist()
        transport.group, transport.deadlines = Group.on_hosts([key for key, _ in told]), deadlines
        transport.nonce = told[0][1]
        if len(transport.group.hosts) > 1:
            transport.segment_bytes = BETWEEN_HOSTS_BYTES
        return transport

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group, until this transport is closed or the user destroys it."""
        found = self.find_group()
        if found is None:
            raise FabricClosed("the fabric is closed, or its process group was destroyed; make a new one")
        return found

    def calls(self) -> TorchCalls:
        return TorchCalls(self)

    @property
    def outlived(self) -> bool:
        return not self.is_closed and not exists(self.find_group())

    def channel(self, open_channel: Callable[[str], Channel]) -> TorchChannel:
        self.health.listen()
        return TorchChannel(self, open_channel)

    def post(self, sends: Messages, receives: Messages) -> TorchPending:
        self.birthplace.require()
        group, started = self.process_group, time.monotonic()
        try:
            if self.backend == "nccl":
                return TorchPending(self, self._post_together(sends, receives))
            works = [(group.recv([tensor], source, 0), source) for tensor, source in receives]
            works += [(group.send([tensor], to, 0), to) for tensor, to in sends]
            return TorchPending(self, works)
        except RuntimeError as error:
            peers = [peer for _, peer in [*receives, *sends]]
            raise self.health.failed(peers[0] if peers else None, error, started, self.during) from error

    def _post_together(self, sends: Messages, receives: Messages) -> list[tuple[dist.Work, int]]:
        """NCCL needs the messages of a step as one group, or two ranks that both send first block each other."""
        messages = [(dist.irecv, *receive) for receive in receives] + [(dist.isend, *send) for send in sends]
        ranks = dist.get_process_group_ranks(self.process_group)
        calls = [dist.P2POp(call, tensor, ranks[peer], self.process_group) for call, tensor, peer in messages]
        works = dist.batch_isend_irecv(calls)
        return list(zip(works, (peer for _, _, peer in messages), strict=False))

    def connect(self, ranks: tuple[int, ...], name: str) -> TorchTransport:
        """Its members make a process group under a name that only they use, and only once."""
        if self.backend == "mpi" and len(ranks) < self.world:
            raise ConfigError("all ranks of MPI make a group together, so some alone make none; use Gloo or NCCL")
        parent, rank = self.process_group, ranks.index(self.rank)
        in_world = dist.get_process_group_ranks(parent)
        full_name = f"{self.group_name}/{self.nonce:x}/{name} of {ranks}"
        patience, started = timedelta(seconds=self.deadlines.join), time.monotonic()
        store = parent.get_group_store()
        try:
            made = make_group(store, full_name, [in_world[one] for one in ranks], rank, self.backend, patience)
        except JoinFailed as error:
            if "by peer" not in str(error):  # which has closed or reset its connection: it was there, and is gone
                raise
            keeper = self.health.attribution.keeper
            keeper = ranks.index(keeper) if keeper in ranks else None
            its_store = PrefixStore(f"{full_name}/", store)
            attribution = FailureAttribution(lambda: its_store, lambda: None, lambda _: None, rank, len(ranks), keeper)
            raise attribution.blame(None, "lost", f"the making of {name}", time.monotonic() - started) from error
        return TorchTransport(made, self.group.among(ranks), self.deadlines, owns_group=True, parent=self)

    def close(self, drain: bool) -> None:
        self.is_closed = True
        self.health.close(drain)
        super().close(drain)
        # Torch ends the group's threads when the last reference goes, and must not find that one at exit.
        group, self.find_group = self.find_group(), lambda: None
        if self.owns_group and exists(group):  # whichever thread closes it first, if the user has not
            dist.destroy_process_group(None if group is dist.group.WORLD else group)
        self.owns_group = False


def torch_fabric(
    process_group: dist.ProcessGroup | None = None, deadlines: Deadlines | None = None, owns_group: bool = False
) -> Fabric:
    """The fabric over a process group, or over that of all ranks; made by all its members together."""
    if not dist.is_initialized():
        raise ConfigError("there is no process group; call syncline.init() or dist.init_process_group() first")
    chosen = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(chosen, dist.ProcessGroup) or chosen.rank() < 0:
        raise ConfigError("this rank is not a member of the process group; make the fabric on its members")
    return Fabric(TorchTransport.over(chosen, deadlines or Deadlines(), owns_group))


class TorchHealth(Health):
    """Progress and failures are written to the store of the process group."""

    def __init__(self, transport: TorchTransport, watch: AbortWatch | None) -> None:
        """`watch`: that of the transport which this one was made from."""
        self.transport = transport
        self.owns_watch = watch is None
        self.watch = watch or AbortWatch(self._find_store, transport.rank)
        keeper = keeper_of_store(transport.process_group)
        self.attribution = FailureAttribution(
            self._find_store,
            self._close_connections,
            lambda kind: self.watch.tell(self._name, kind),
            transport.rank,
            transport.world,
            keeper,
        )
        self.progress = ProgressStore(self._find_store, transport.rank)
        self.judging = threading.Lock()
        self.starting = threading.Lock()
        self.in_flight: list[dist.Work] = []  # calls of the engine

    def publish(self, progress: RankProgress) -> None:
        self.progress.publish(progress)

    def progress_of(self, rank: int) -> RankProgress:
        return self.progress.read(check_rank(rank, self.transport.world))

    def listen(self) -> None:
        """Hear of an abort by another rank also while this one waits for a third."""
        if self.transport.world > 1:
            self.watch.add(self._name, self._aborted)

    def abort(self, why: str) -> None:
        with self.starting:
            self.failure = self.failure or PeerAborted(self.transport.rank, why)
        self.attribution.abort()

    def _aborted(self, kind: Kind) -> None:
        """Another rank has aborted, or noticed that one is lost or stalled: end what is under way here."""
        seen: Kind = "lost" if kind == "aborted" else kind  # this rank itself has not aborted
        self._judge(None, seen, self.watch.waits_since(), self.transport.during)

    def failed(self, peer: int | None, error: RuntimeError, started: float, during: str) -> FabricError:
        """Find out who is to blame, wake the others, and remember it: once, whichever thread notices first."""
        kind: Kind = "stalled" if "imed out" in str(error) or "imeout" in str(error) else "lost"
        return self._judge(peer, kind, started, during)

    def _judge(self, peer: int | None, kind: Kind, started: float, during: str) -> FabricError:
        with self.judging:
            if self.failure is None:
                self.failure = self.attribution.blame(peer, kind, during, time.monotonic() - started)
            return self.failure

    def close(self, drain: bool) -> None:
        """Stop publishing; without `drain` calls that are under way fail, here and on the other ranks."""
        self.watch.remove(self._name)
        if self.owns_watch:
            self.watch.close()
        self.attribution.linger()
        self.progress.close()  # before others notice, who will want to know how far this rank came
        if not drain and self.transport.thread.busy():
            with self.starting:  # and nobody else is to blame
                self.failure = FabricClosed("the fabric was closed while a call was under way")
            self._wait_for_engine()
            self._close_connections()

    def _wait_for_engine(self) -> None:
        """Wait a moment for calls of the engine: all ranks have begun them, so they end unless a rank is in trouble.

        Gloo does not tell a send that is half written that its connection is closed; it would wait for its deadline.
        """
        until = time.monotonic() + DRAIN_S
        while self.in_flight and time.monotonic() < until:
            time.sleep(0.005)

    @property
    def _name(self) -> str:
        """The same on all ranks of this transport, and on no other."""
        return f"{self.transport.group_name}/{self.transport.nonce:x}"

    def _find_store(self) -> Store:
        return self.transport.process_group.get_group_store()

    def _close_connections(self) -> None:
        close_connections(self.transport.process_group)


class TorchCalls(MessageCalls):
    """Calls along schedules, or the engine's own all-reduce."""

    transport: TorchTransport

    def begin_engine(self, tensor: Tensor, op: Op) -> Callable[[], bool | None]:
        """The engine's sum and our division; 16-bit types are widened, so that sums are fp32 here too.

        Gloo's maximum passes over NaN, which is no number to pass over: where NaN is goes along as a second maximum.
        """
        wide = tensor.detach().to(torch.float32 if tensor.dtype in HALVES else tensor.dtype).contiguous()
        undefined = wide.isnan().to(torch.int32) if op == "max" and wide.is_floating_point() else None
        reduced = self._start(wide, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        found = self._start(undefined, dist.ReduceOp.MAX) if undefined is not None else None

        def end() -> bool | None:
            reduced()
            finite = divide(wide, self.transport.world) if op == "mean" else None
            if found is not None and undefined is not None:
                found()
                wide.masked_fill_(undefined.bool(), float("nan"))
            if wide.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(wide)
            return finite

        return end

    def _start(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Callable[[], None]:
        """Start an all-reduce of the engine's own, with our deadline; what is returned waits for it."""
        transport, health = self.transport, self.transport.health
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        options.timeout = timedelta(seconds=transport.deadlines.operation)
        started, during = time.monotonic(), transport.during

        with health.starting:
            if health.failure is not None:
                raise health.failure
            try:
                work = transport.process_group.allreduce([tensor], options)
            except RuntimeError as error:
                raise health.failed(None, error, started, during) from error
            health.in_flight.append(work)
            health.watch.call_begins(work)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise health.failed(None, error, started, during) from error
            finally:
                health.in_flight.remove(work)
                health.watch.call_ends(work)

        return wait


class TorchPending:
    """Messages of a process group under way."""

    def __init__(self, transport: TorchTransport, works: list[tuple[dist.Work, int]]) -> None:
        self.transport = transport
        self.works = works

    def wait(self, deadline_s: float | None = None) -> None:
        """Wait for all of them, receives first."""
        self.transport.birthplace.require()
        started = time.monotonic()
        until = started + (deadline_s or self.transport.deadlines.operation)
        watch = self.transport.health.watch
        watch.call_begins(self)
        try:
            while self.works:
                work, peer = self.works[0]
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
                self.works.pop(0)
        except RuntimeError as error:
            raise self.transport.health.failed(peer, error, started, self.transport.during) from error
        finally:
            watch.call_ends(self)


class TorchChannel(MessageChannel):
    """Calls of the engine, which has threads of its own; what is no call of the engine goes along a schedule."""

    transport: TorchTransport

    def __init__(self, transport: TorchTransport, open_channel: Callable[[str], Channel]) -> None:
        super().__init__(transport, open_channel)
        self.second: TorchChannel | None = None  # for calls that follow others of this channel
        self.followed = InOrder()
        self.scratch = ScratchMemory()

    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> Handle:
        if collective == "direct" and op == "mean" and tensor.dtype in HALVES and self.transport.backend == "gloo":
            return self._mean_of_halves(tensor)
        if collective != "engine":
            return super()._all_reduce(tensor, op, collective)
        if op == "sum" and not tensor.is_floating_point() and self._goes_at_once(tensor.nbytes):
            return self._sum_at_once(tensor)
        wide = tensor.detach().to(torch.float32 if tensor.dtype in HALVES else tensor.dtype).contiguous()
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=self.transport.deadlines.operation)
        call = describe("all_reduce", op, tensor, "engine")

        def end() -> bool | None:
            finite = divide(wide, self.world) if op == "mean" else None
            if wide.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(wide)
            return finite

        return self._start(call, lambda group: group.allreduce([wide], options), end)

    def _goes_at_once(self, nbytes: int) -> bool:
        """Whether a message goes from everyone to everyone in one hop: a ring takes as many hops as there are ranks."""
        return nbytes <= AT_ONCE_BYTES and self.world <= AT_ONCE_RANKS

    def _sum_at_once(self, tensor: Tensor) -> Handle:
        """The sum of small integers, whose order does not matter."""
        parts = tensor.detach().view(-1).repeat(self.world, 1)
        taken = torch.empty_like(parts)

        def end() -> bool | None:
            tensor.detach().view(-1).copy_(taken.sum(0))
            return None

        return self._exchanged(taken, parts, end)

    def prepare_means_of_halves(self) -> None:
        if self.second is None and self.transport.backend == "gloo":
            second = self.open_channel("means of halves")
            assert isinstance(second, TorchChannel)
            self.second = second

    def _all_gather(self, gathered: Tensor, own: Tensor) -> Handle:
        return self._gathered(gathered, own)

    def _gathered(self, gathered: Tensor, own: Tensor, end: Callable[[], bool | None] = lambda: None) -> EngineHandle:
        if self._goes_at_once(own.nbytes):
            return self._exchanged(gathered, own.view(-1).repeat(self.world, 1), end)
        call = describe("all_gather", "copy", own, "engine")
        deadline = timedelta(seconds=self.transport.deadlines.operation)
        return self._start(call, lambda group: start_gather(group, gathered.view(-1), own, deadline), end)

    def _exchange(self, taken: Tensor, parts: Tensor) -> Handle:
        return self._exchanged(taken, parts)

    def _exchanged(self, taken: Tensor, parts: Tensor, end: Callable[[], bool | None] = lambda: None) -> EngineHandle:
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self.transport.deadlines.operation)
        call = describe("all_to_all", "copy", parts, "engine")
        return self._start(
            call, lambda group: group.alltoall_base(taken.view(-1), parts.view(-1), [], [], options), end
        )

    def _mean_of_halves(self, tensor: Tensor) -> Handle:
        """The direct all-reduce in two calls of the engine: slices to their owners, who add in fp32, and means to all.

        The second calls have a group of their own, because they begin when the first ones are over.
        """
        self.prepare_means_of_halves()
        second, slices = self.second, sliced(tensor, self.world)
        assert second is not None
        taken = self.scratch.take(slices)

        def end() -> None:
            self.scratch.give_back(taken)
            if slices.data_ptr() != tensor.data_ptr():
                tensor.copy_(slices.view(-1)[: tensor.numel()])

        def add_up() -> Callable[[], EngineHandle]:
            mean_of_halves(taken)
            return lambda: second._gathered(slices, taken[0], end)

        return self.followed.follow(self._exchanged(taken, slices), add_up)

    def _start(
        self, call: str, start: Callable[[dist.ProcessGroup], dist.Work], end: Callable[[], bool | None] = lambda: None
    ) -> EngineHandle:
        """Let the engine begin; `end` makes the result what was asked for."""
        self.transport.begin_call(call)
        began = time.monotonic_ns()
        try:
            return EngineHandle(self.transport, call, start(self.transport.process_group), end, began)
        except RuntimeError as error:
            raise self.transport.health.failed(None, error, began / 1e9, call) from error


def sliced(flat: Tensor, world: int) -> Tensor:
    """A slice for every rank, all of one length: the tensor's own memory, or a copy with zeros at its end."""
    if flat.numel() % world == 0:
        return flat.view(world, -1)
    slices = flat.new_zeros(world, -(-flat.numel() // world))
    slices.view(-1)[: flat.numel()] = flat
    return slices
