"""Torch: any torch.distributed process group. Gloo is tested here; NCCL and MPI are written to work and untested.

Schedules run over the group's point-to-point calls; `collective="engine"` hands the tensor to its own all-reduce.
When a message fails, ranks hold an inquest through the group's store, so that all of them name the rank that is to
blame and not the neighbour that gave up before them.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store, _new_process_group_helper, _world

from syncline.collectives.execute import HALVES, Op
from syncline.collectives.schedule import Hosts
from syncline.errors import ConfigError, FabricClosed, FabricError, JoinFailed, PeerAborted
from syncline.fabric.base import Handle, Note, Times, describe
from syncline.fabric.blame import Kind
from syncline.fabric.board import Board
from syncline.fabric.channel import Channel, MessageChannel
from syncline.fabric.deadlines import Deadlines
from syncline.fabric.divide import divide, mean_of_halves
from syncline.fabric.hosts import group_by_host, host_key
from syncline.fabric.inquest import Inquest
from syncline.fabric.messages import MessageFabric

AT_ONCE_BYTES = 128 << 10  # of a message that goes from everyone to everyone: more would meet in the queue of a link
AT_ONCE_RANKS = 16
LANDING_S = 5.0  # for calls of the engine that all ranks have begun, when a fabric is closed without waiting
BETWEEN_HOSTS_BYTES = 256 << 10  # of a segment: a slow link is kept busy while the owner of a slice adds


class TorchFabric(MessageFabric):
    """One rank of a torch.distributed process group."""

    name: ClassVar[str] = "torch"
    has_engine: ClassVar[bool] = True

    def __init__(
        self, group: dist.ProcessGroup | None = None, deadlines: Deadlines | None = None, owns_group: bool = False
    ) -> None:
        """`owns_group`: closing the fabric destroys the group."""
        if not dist.is_initialized():
            raise ConfigError("there is no process group; call syncline.init() or dist.init_process_group() first")
        chosen = group if group is not None else dist.group.WORLD
        if not isinstance(chosen, dist.ProcessGroup) or chosen.rank() < 0:
            raise ConfigError("this rank is not a member of the process group; make the fabric on its members")
        rank, world = chosen.rank(), chosen.size()
        super().__init__(rank, world, ((rank,),), deadlines or Deadlines())
        # A world's store keeps its port, and what was said in it, until nobody holds the group that the user destroys.
        self.find_group: Callable[[], dist.ProcessGroup | None] = (
            weakref.ref(chosen) if chosen is dist.group.WORLD else lambda: chosen
        )
        self.backend = dist.get_backend(chosen)
        self.owns_group = owns_group
        if self.backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.receives_ahead = False
        self.inquest = Inquest(lambda: self.group, rank, world, keeper_of_store(chosen))
        self.judging = threading.Lock()
        self.starting = threading.Lock()
        self.aloft: list[dist.Work] = []  # calls of the engine
        self.board = Board(lambda: self.group, rank)
        self.hosts, self.nonce = self._meet()
        if len(self.hosts) > 1:
            self.segment_bytes = BETWEEN_HOSTS_BYTES

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, until this fabric is closed or the user destroys it."""
        group = self.find_group()
        if group is None:
            raise FabricClosed("the fabric is closed, or its process group was destroyed; make a new one")
        return group

    @property
    def outlived(self) -> bool:
        return not self.is_closed and self.find_group() not in _world.pg_map

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> TorchPending:
        self.birthplace.require()
        try:
            if self.backend == "nccl":
                return TorchPending(self, self._post_together(sends, receives))
            works = [(self.group.recv([tensor], source, 0), source) for tensor, source in receives]
            works += [(self.group.send([tensor], to, 0), to) for tensor, to in sends]
            return TorchPending(self, works)
        except RuntimeError as error:
            peers = [peer for _, peer in [*receives, *sends]]
            raise self.failed(peers[0] if peers else None, error, time.monotonic()) from error

    def _post_together(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> list[tuple[dist.Work, int]]:
        """NCCL needs the messages of a step as one group, or two ranks that both send first block each other."""
        messages = [(dist.irecv, *receive) for receive in receives] + [(dist.isend, *send) for send in sends]
        ranks = dist.get_process_group_ranks(self.group)
        calls = [dist.P2POp(call, tensor, ranks[peer], self.group) for call, tensor, peer in messages]
        works = dist.batch_isend_irecv(calls)
        return list(zip(works, (peer for _, _, peer in messages), strict=False))

    def _engine_all_reduce(self, tensor: Tensor, op: Op) -> Callable[[], bool | None]:
        """The engine's sum and our division; 16-bit types are widened, so that sums are fp32 here too.

        Gloo's maximum passes over NaN, which is no number to pass over: where NaN is goes along as a second maximum.
        """
        wide = tensor.detach().to(torch.float32 if tensor.dtype in HALVES else tensor.dtype).contiguous()
        undefined = wide.isnan().to(torch.int32) if op == "max" and wide.is_floating_point() else None
        reduced = self._engine_call(wide, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        told = self._engine_call(undefined, dist.ReduceOp.MAX) if undefined is not None else None

        def end() -> bool | None:
            reduced()
            finite = divide(wide, self.world) if op == "mean" else None
            if told is not None and undefined is not None:
                told()
                wide.masked_fill_(undefined.bool(), float("nan"))
            if wide.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(wide)
            return finite

        return end

    def _engine_call(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Callable[[], None]:
        """Start an all-reduce of the engine's own, with our deadline; what is returned waits for it."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        options.timeout = timedelta(seconds=self.deadlines.operation)
        started, during = time.monotonic(), self.during

        with self.starting:
            if self.broken is not None:
                raise self.broken
            try:
                work = self.group.allreduce([tensor], options)
            except RuntimeError as error:
                raise self.failed(None, error, started) from error
            self.aloft.append(work)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.failed(None, error, started, during) from error
            finally:
                self.aloft.remove(work)

        return wait

    def _meet(self) -> tuple[Hosts, int]:
        """Learn which ranks share a host, and a number that no other fabric over this group has.

        These are the first messages of the group, so they have the deadline for joining.
        """
        usual, self.deadlines = self.deadlines, Deadlines(self.deadlines.join, self.deadlines.join)
        told = self.all_gather(torch.tensor([host_key(), secrets.randbits(62)], device=self.device)).tolist()
        self.deadlines = usual
        return group_by_host([key for key, _ in told]), told[0][1]

    def failed(self, peer: int | None, error: RuntimeError, started: float, during: str = "") -> FabricError:
        """Find out who is to blame, wake the others, and remember it: once, whichever thread notices first."""
        with self.judging:
            if self.broken is None:
                kind: Kind = "stalled" if "imed out" in str(error) or "imeout" in str(error) else "lost"
                self.broken = self.inquest.hold(peer, kind, during or self.during, time.monotonic() - started)
            return self.broken

    def with_engine(self) -> TorchFabric:
        return self

    def write_note(self, note: Note) -> None:
        self.board.write(note)

    def note_of(self, rank: int) -> Note:
        return self.board.read(self._peer(rank))

    def _channel(self) -> Channel:
        return TorchChannel(self)

    def _abort(self, why: str) -> None:
        with self.starting:
            self.broken = self.broken or PeerAborted(self.rank, why)
        self.inquest.tell_abort()

    def _sibling(self) -> TorchFabric:
        everyone = tuple(range(self.world))
        return TorchFabric(self._new_group(everyone, f"sibling {self.siblings_made}"), self.deadlines, owns_group=True)

    def _subgroup(self, ranks: tuple[int, ...], number: int) -> TorchFabric:
        if self.backend == "mpi":
            raise ConfigError("all ranks of MPI make a group together, so some alone make none; use Gloo or NCCL")
        return TorchFabric(self._new_group(ranks, f"subgroup {number}"), self.deadlines, owns_group=True)

    def _new_group(self, ranks: tuple[int, ...], kind: str) -> dist.ProcessGroup:
        """Some ranks of this group as a group, in that order, under a name that only they use and only once.

        `dist.new_group` names a group of some ranks after them and the number of groups that the caller has. Ranks do
        not have that in common, and it comes again when a group was destroyed. So what is behind it is used here.
        """
        in_world = dist.get_process_group_ranks(self.group)
        members = [in_world[rank] for rank in ranks]
        name = f"{self.group.group_name}/{self.nonce:x}/{kind} of {ranks}"
        patience, started = timedelta(seconds=self.deadlines.join), time.monotonic()
        store, rank = self.group.get_group_store(), ranks.index(self.rank)
        try:
            return make_group(store, name, members, rank, self.backend, patience)
        except JoinFailed as error:
            if "by peer" not in str(error):  # which has closed or reset its connection: it was there, and is gone
                raise
            keeper = ranks.index(self.inquest.keeper) if self.inquest.keeper in ranks else None
            inquest = UnmadeInquest(PrefixStore(f"{name}/", store), rank, len(ranks), keeper)
            raise inquest.hold(None, "lost", f"the making of {kind}", time.monotonic() - started) from error

    def _let_land(self) -> None:
        """Wait a moment for calls of the engine: all ranks have begun them, so they end unless a rank is in trouble.

        Gloo does not tell a send that is half written that its connection is closed; it would wait for its deadline.
        """
        until = time.monotonic() + LANDING_S
        while self.aloft and time.monotonic() < until:
            time.sleep(0.005)

    def _close(self, drain: bool) -> None:
        self.inquest.linger()
        self.board.close()  # before others notice, who will want to know how far this rank came
        if not drain and self.worker.busy():
            with self.starting:  # and nobody else is to blame
                self.broken = FabricClosed("the fabric was closed while a call was under way")
            self._let_land()
            self.inquest.give_up_connections()
        super()._close(drain)
        # Torch ends the group's threads when the last reference goes, and must not find that one at exit.
        group, self.find_group = self.find_group(), lambda: None
        if self.owns_group and group in _world.pg_map:  # whichever thread closes it first, if the user has not
            dist.destroy_process_group(None if group is dist.group.WORLD else group)
        self.owns_group = False


class UnmadeInquest(Inquest):
    """Of a group that could not be made here, though perhaps elsewhere: its store is there, its connections are not."""

    def __init__(self, store: Store, rank: int, world: int, keeper: int | None) -> None:
        def find_group() -> dist.ProcessGroup:
            raise FabricClosed("the group was not made")

        super().__init__(find_group, rank, world, keeper)
        self.store = store

    def _store(self) -> Store:
        return PrefixStore("syncline/inquest", self.store)

    def give_up_connections(self) -> None:
        """They are closed."""


def keeper_of_store(group: dist.ProcessGroup) -> int | None:
    """The rank of a group whose process keeps its store; None if none of its ranks does."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or dist.group.WORLD is None:
        return None
    is_kept = isinstance(base_of(dist.group.WORLD.get_group_store()), TCPStore)
    ranks = dist.get_process_group_ranks(group)
    return ranks.index(0) if is_kept and 0 in ranks else None


def base_of(store: Store) -> Store:
    """The store itself, without the prefixes of groups."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def make_group(
    store: Store, name: str, members: list[int], rank: int, backend: str, patience: timedelta
) -> dist.ProcessGroup:
    """A group under a name; `members` are ranks of the world, this process the one at `rank` of them."""
    try:
        made: tuple[dist.ProcessGroup, object] = _new_process_group_helper(
            len(members),
            rank,
            members,
            dist.Backend(backend),
            store,
            name,  # type: ignore[arg-type]
            timeout=patience,
        )
    except RuntimeError as error:
        raise JoinFailed(f"{name}: not all have come within {patience.total_seconds()} s: {error}") from error
    _world.pg_group_ranks[made[0]] = {member: number for number, member in enumerate(members)}
    return made[0]


class TorchPending:
    """Messages of a process group under way."""

    def __init__(self, fabric: TorchFabric, works: list[tuple[dist.Work, int]]) -> None:
        self.fabric = fabric
        self.works = works

    def wait(self, deadline_s: float | None = None) -> None:
        """Wait for all of them, receives first."""
        self.fabric.birthplace.require()
        started = time.monotonic()
        until = started + (deadline_s or self.fabric.deadlines.operation)
        while self.works:
            work, peer = self.works[0]
            try:
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise self.fabric.failed(peer, error, started) from error
            self.works.pop(0)


class TorchChannel(MessageChannel):
    """Calls of the engine, which has threads of its own; what is no call of the engine goes along a schedule."""

    fabric: TorchFabric

    def __init__(self, fabric: TorchFabric) -> None:
        super().__init__(fabric)
        self.second: TorchChannel | None = None  # for calls that follow others of this channel
        self.followed = InOrder()
        self.scratch = ScratchMemory()

    def _all_reduce(self, tensor: Tensor, op: Op, collective: str) -> Handle:
        if collective == "direct" and op == "mean" and tensor.dtype in HALVES and self.fabric.backend == "gloo":
            return self._mean_of_halves(tensor)
        if collective != "engine":
            return super()._all_reduce(tensor, op, collective)
        if op == "sum" and not tensor.is_floating_point() and self._goes_at_once(tensor.nbytes):
            return self._sum_at_once(tensor)
        wide = tensor.detach().to(torch.float32 if tensor.dtype in HALVES else tensor.dtype).contiguous()
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=self.fabric.deadlines.operation)
        call = describe("all_reduce", op, tensor, "engine")

        def end() -> bool | None:
            finite = divide(wide, self.fabric.world) if op == "mean" else None
            if wide.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(wide)
            return finite

        return self._start(call, lambda group: group.allreduce([wide], options), end)

    def _goes_at_once(self, nbytes: int) -> bool:
        """Whether a message goes from everyone to everyone in one hop: a ring takes as many hops as there are ranks."""
        return nbytes <= AT_ONCE_BYTES and self.fabric.world <= AT_ONCE_RANKS

    def _sum_at_once(self, tensor: Tensor) -> Handle:
        """The sum of small integers, whose order does not matter."""
        parts = tensor.detach().view(-1).repeat(self.fabric.world, 1)
        taken = torch.empty_like(parts)

        def end() -> bool | None:
            tensor.detach().view(-1).copy_(taken.sum(0))
            return None

        return self._exchanged(taken, parts, end)

    def _all_gather(self, gathered: Tensor, own: Tensor) -> Handle:
        return self._gathered(gathered, own)

    def _gathered(self, gathered: Tensor, own: Tensor, end: Callable[[], bool | None] = lambda: None) -> EngineHandle:
        if self._goes_at_once(own.nbytes):
            return self._exchanged(gathered, own.view(-1).repeat(self.fabric.world, 1), end)
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=self.fabric.deadlines.operation)
        call = describe("all_gather", "copy", own, "engine")
        return self._start(call, lambda group: group._allgather_base(gathered.view(-1), own, options), end)

    def _exchange(self, taken: Tensor, parts: Tensor) -> Handle:
        return self._exchanged(taken, parts)

    def _exchanged(self, taken: Tensor, parts: Tensor, end: Callable[[], bool | None] = lambda: None) -> EngineHandle:
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self.fabric.deadlines.operation)
        call = describe("all_to_all", "copy", parts, "engine")
        return self._start(
            call, lambda group: group.alltoall_base(taken.view(-1), parts.view(-1), [], [], options), end
        )

    def _mean_of_halves(self, tensor: Tensor) -> Handle:
        """The direct all-reduce in two calls of the engine: slices to their owners, who add in fp32, and means to all.

        The second calls have a group of their own, because they begin when the first ones are over.
        """
        if self.second is None:
            self.second = TorchChannel(self.fabric.sibling())
        second, slices = self.second, sliced(tensor, self.fabric.world)
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
        self.fabric.begin_call(call)
        began = time.monotonic_ns()
        try:
            return EngineHandle(self.fabric, call, start(self.fabric.group), end, began)
        except RuntimeError as error:
            raise self.fabric.failed(None, error, began / 1e9, call) from error


def sliced(flat: Tensor, world: int) -> Tensor:
    """A slice for every rank, all of one length: the tensor's own memory, or a copy with zeros at its end."""
    if flat.numel() % world == 0:
        return flat.view(world, -1)
    slices = flat.new_zeros(world, -(-flat.numel() // world))
    slices.view(-1)[: flat.numel()] = flat
    return slices


class EngineHandle:
    """A call of the engine under way."""

    def __init__(
        self, fabric: TorchFabric, call: str, work: dist.Work, end: Callable[[], bool | None], began_ns: int
    ) -> None:
        self.fabric = fabric
        self.call = call
        self.work = work
        self.end = end
        self.began_ns = self.ended_ns = began_ns
        self.is_ended = False
        self.is_finite: bool | None = None
        self.future = work.get_future()
        self.future.add_done_callback(self._note_time)

    def _note_time(self, _: object) -> None:
        self.ended_ns = time.monotonic_ns()

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when it is done; raise what it raised. Ctrl-C is heard meanwhile."""
        self.fabric.birthplace.require()
        if not self.done():
            ended = threading.Event()
            self.on_done(ended.set)
            if not ended.wait(deadline_s):
                raise self.late(deadline_s)
        if self.is_ended:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.fabric.failed(None, error, self.began_ns / 1e9, self.call) from error
        self.is_ended = True
        self.is_finite = self.end()

    def late(self, after_s: float | None) -> FabricError:
        """The error of a wait that was too short."""
        return FabricError(
            f"{self.call} is not done after {after_s} s; it goes on, and fails by itself when a rank is "
            f"{self.fabric.deadlines.operation} s late"
        )

    def done(self) -> bool:
        """Whether it is over, one way or another."""
        return bool(self.future.done())

    def on_done(self, call: Callable[[], None]) -> None:
        """Have something called when it is over, in a thread of the engine."""
        self.future.add_done_callback(lambda _: call())

    def times(self) -> Times:
        """When it happened; an engine does not say when all ranks had arrived."""
        return Times(self.began_ns, self.began_ns, self.ended_ns)

    def finite(self) -> bool | None:
        """Whether no element of the result is infinite or NaN, where that came out on the way."""
        return self.is_finite


class ScratchMemory:
    """Memory for what comes from others, kept from call to call: pages that are given back are slow to get again."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A tensor like this one, with whatever is in it."""
        free = self.free.get((like.dtype, like.shape))
        return free.pop() if free else torch.empty_like(like)

    def give_back(self, tensor: Tensor) -> None:
        """Let others have it."""
        self.free.setdefault((tensor.dtype, tensor.shape), []).append(tensor)


class InOrder:
    """Calls that follow others, each begun when its first one is over: in the order of those, which all ranks share.

    They begin in the thread of the engine that has ended the first one: it is awake, and another one would take long.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.waiting: deque[FollowedHandle] = deque()

    def follow(self, first: EngineHandle, prepare: Callable[[], Callable[[], EngineHandle]]) -> FollowedHandle:
        """Prepare a second call when the first is over; what that returns begins it, in its turn."""
        handle = FollowedHandle(first)
        with self.lock:
            self.waiting.append(handle)
        first.on_done(lambda: self._go_on(handle, prepare))
        return handle

    def _go_on(self, handle: FollowedHandle, prepare: Callable[[], Callable[[], EngineHandle]]) -> None:
        begin = handle.begin_after(prepare)
        with self.lock:
            handle.begin = begin
            while self.waiting and self.waiting[0].begin is not None:
                self.waiting.popleft().go_on()


class FollowedHandle:
    """Two calls of the engine under way, of which the second follows the first."""

    def __init__(self, first: EngineHandle) -> None:
        self.first = first
        self.begin: Callable[[], EngineHandle] | None = None  # the second call, once the first is over
        self.last: Future[EngineHandle] = Future()  # the call that ends it, when that has begun

    def begin_after(self, prepare: Callable[[], Callable[[], EngineHandle]]) -> Callable[[], EngineHandle]:
        """What begins the second call; a first one that has failed is the last."""
        try:
            self.first.future.value()
        except RuntimeError:
            return lambda: self.first
        try:
            return prepare()
        except BaseException as error:
            self.last.set_exception(error)
            return lambda: self.first

    def go_on(self) -> None:
        """Begin the second call, now that all before it have begun."""
        assert self.begin is not None
        if self.last.done():
            return
        try:
            last = self.begin()
        except BaseException as error:
            self.last.set_exception(error)
        else:
            self.last.set_result(last)

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when it is done; raise what it raised. Ctrl-C is heard meanwhile."""
        self.first.fabric.birthplace.require()
        try:
            last = self.last.result(deadline_s)
        except FutureTimeout:
            raise self.first.late(deadline_s) from None
        last.wait(deadline_s)

    def done(self) -> bool:
        """Whether it is over, one way or another."""
        return self.last.done() and (self.last.exception() is not None or self.last.result().done())

    def on_done(self, call: Callable[[], None]) -> None:
        """Have something called when it is over, in a thread of the engine."""
        self.last.add_done_callback(
            lambda last: call() if last.exception() is not None else last.result().on_done(call)
        )

    def times(self) -> Times:
        """When it happened; an engine does not say when all ranks had arrived."""
        return Times(self.first.began_ns, self.first.began_ns, self.last.result().ended_ns)

    def finite(self) -> bool | None:
        """Whether no element of the result is infinite or NaN, which nobody has looked at."""
        return None
