"""What ranks of a job with servers do in tests where a new process takes the place of one. Light: ranks import it."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD

import syncline
from support.on_a_line import RATE, START, Line, slope_of
from support.outcomes import Outcome, outcome_of
from support.patience import within
from support.telling import PATIENCE_S, tell, wait_for
from syncline.errors import FabricError, PeerError
from syncline.modes.serving.client import Client
from syncline.modes.serving.clock import Read
from syncline.modes.serving.link import FabricLink, Message
from syncline.modes.serving.server import Server, Update

SMALL_BUCKETS = {"first_bucket_bytes": 16, "bucket_bytes": 64}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def give_up() -> None:
    raise RuntimeError("this worker gives up")


ENDS: dict[str, Callable[[], None]] = {"killed": die, "exits": partial(os._exit, 3), "fails": give_up}


# What servers and workers have


class Furnished(Line):
    """With a buffer and a frozen parameter, which are in no bucket."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(width)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))

    def mark(self, rank: int) -> None:
        """As if each rank had come to something of its own."""
        self.count.fill_(10 + rank)
        self.frozen.data.fill_(20.0 + rank)


def digest_of(named: Mapping[str, Tensor], names: Iterable[str]) -> str:
    data = b"".join(named[name].detach().numpy().tobytes() for name in sorted(names))
    return hashlib.blake2b(data).hexdigest()


class Logged:
    """What a server had whenever a worker read it."""

    def __init__(self) -> None:
        self.digests: dict[tuple[int, int], str] = {}  # by worker and version
        read = Server.read

        def logged(server: Server, worker: int) -> int:
            version = read(server, worker)
            self.digests[worker, version] = digest_of(server.parameters, server.parameters)
            return version

        Server.read = logged


@dataclass(frozen=True)
class Report:
    """What one rank has seen."""

    incarnation: int
    place: Tensor  # where the parameters ended
    began: int  # with which step
    marks: tuple[int, float]  # of what is in no bucket, when it began
    taken: dict[int, tuple[int, str]]  # by server: which version was read first, and what it was
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Replaced:
    """A worker makes some steps and ends; one after it makes more, while the others train until it is done."""

    mode: str
    folder: str
    victim: int = 2
    codec: str = "none"
    ends: tuple[str, ...] = ("killed",)  # how each process of the victim ends, but for the last
    entering: str = ""  # when those after the first end: at that moment of entering, instead of after some steps
    steps: int = 6  # of each process of the victim
    width: int = 3  # of a newcomer's model
    others: int = 0  # steps of the others, if not until the victim is done
    notices_s: float = 0.0  # how late servers notice that a worker is gone

    def __call__(self, fabric: syncline.Fabric) -> Report:
        log = Logged()
        notice_late(self.notices_s)
        is_newcomer, is_victim = fabric.incarnation > 0, fabric.rank == self.victim
        is_doomed = is_victim and fabric.incarnation < len(self.ends)
        end = ENDS[self.ends[fabric.incarnation]] if is_doomed else die
        if is_newcomer and is_doomed and self.entering:
            strike_at(self.entering, end)
        model = Furnished(self.width if is_newcomer else 3)
        optimizer = SGD(model.parameters(), lr=RATE)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode=self.mode, codec=self.codec, **SMALL_BUCKETS)
        began, marks = sync.driver.steps, (model.count.item(), model.frozen[0].item())
        taken = {server: first_read(client, model) for server, client in sync.driver.clients.items()}
        model.mark(fabric.rank)
        started = time.monotonic()
        if not sync.serve():
            self.train(model, optimizer, is_victim)
            if is_doomed:
                end()
            if is_victim:
                tell(self.folder, "done")
            sync.drain()
        seconds = time.monotonic() - started
        place = torch.cat([model.first.detach().flatten(), model.second.detach().flatten()])
        sync.close()
        report = Report(fabric.incarnation, place, began, marks, taken, log.digests, seconds=seconds)
        server = sync.driver.server
        return replace(report, updates=list(server.updates), reads=list(server.clock.reads)) if server else report

    def train(self, model: nn.Module, optimizer: SGD, is_victim: bool) -> None:
        """Constant gradients: so many steps, or until the victim's last process is done."""
        until, steps, rank = time.monotonic() + PATIENCE_S, 0, int(model.count) - 10
        most = self.steps if is_victim else self.others
        while steps < most if most else not Path(self.folder, "done").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
            optimizer.zero_grad()
            model(slope_of(rank)).backward()
            optimizer.step()
            steps += 1


def notice_late(seconds: float) -> None:
    """Whoever attends to a worker that is gone is slow to notice."""
    receive = FabricLink.receive

    def received(link: FabricLink, deadline_s: float | None = None) -> Message:
        try:
            return receive(link, deadline_s)
        except FabricError:
            time.sleep(seconds)
            raise

    FabricLink.receive = received


def first_read(client: Client, model: nn.Module) -> tuple[int, str]:
    """Of one server: the version, and what this worker has of it."""
    names = [slot.name for slots in client.buckets.values() for slot in slots]
    return client.version, digest_of(dict(model.named_parameters()), names)


def strike_at(moment: str, end: Callable[[], None]) -> None:
    """In the process of a newcomer: it ends before it enters, when it is known, when it has entered, or as it reads."""
    from syncline.fabric import membership
    from syncline.modes.serving import client as client_module

    def first(*_: object) -> None:
        end()

    if moment == "asking":

        def ask_and_end(self: membership.Membership, fabric: syncline.Fabric, rank: int) -> None:
            request = membership.RejoinRequest(fabric.rank, fabric.incarnation)
            self.attempt(membership.place_of(fabric, rank), request).ask()
            end()

        membership.Membership.rejoin = ask_and_end
    if moment == "known":
        Client.enter = first
    if moment == "entered":
        Client.ask_to_pull = first
    if moment == "reading":
        client_module.write = first


def expected_place(updates: Iterable[Update]) -> Tensor:
    """Without shares: every update moved the parameters by its worker's slope."""
    return torch.full((9,), START - RATE * sum(slope_of(update.worker) for update in updates))


# Newcomers and everything else


def refused_calls(fabric: syncline.Fabric, folder: str) -> dict[str, Outcome]:
    """What a newcomer is told when it calls what needs all ranks."""
    if fabric.rank != 1 or not fabric.incarnation:
        return wait_or_die(fabric, folder)
    one = torch.ones(4)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: fabric.all_reduce(one),
        "all_reduce_async": lambda: fabric.all_reduce_async(one),
        "reduce_scatter": lambda: fabric.reduce_scatter(one),
        "all_gather": lambda: fabric.all_gather(one),
        "broadcast": lambda: fabric.broadcast(one),
        "all_to_all": lambda: fabric.all_to_all(torch.ones(2 * fabric.world)),
        "barrier": fabric.barrier,
        "send": lambda: fabric.send(one, 0),
        "subgroup": lambda: fabric.subgroup([1]),
        "all_reduce of a subgroup of all": lambda: fabric.subgroup().all_reduce(one),
    }
    found = {name: outcome_of(call) for name, call in calls.items()}
    tell(folder, "done")
    return found


def wait_or_die(fabric: syncline.Fabric, folder: str) -> dict[str, Outcome]:
    if fabric.rank == 1:
        die()
    wait_for(folder, "done")
    return {}


def begin_with(fabric: syncline.Fabric, mode: str, folder: str) -> Outcome | None:
    """What a newcomer is told that begins with a mode."""
    if fabric.rank != 1 or not fabric.incarnation:
        wait_or_die(fabric, folder)
        return None
    model = Line()
    found = outcome_of(lambda: syncline.Sync(model, SGD(model.parameters(), lr=RATE), fabric=fabric, mode=mode))
    tell(folder, "done")
    return found


def lose_a_server_for_good(fabric: syncline.Fabric, mode: str, victim: int) -> None:
    """A server is killed in the middle. The others end a moment later: nobody is replaced where all have ended."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    if fabric.rank == victim:
        threading.Timer(0.3, die).start()
    try:
        if not sync.serve():
            for _ in range(2000):
                optimizer.zero_grad()
                model(1.0).backward()
                optimizer.step()
                time.sleep(0.005)
    except PeerError:
        time.sleep(within(0.5, most=5.0))
        raise


def come_into_a_meeting(fabric: syncline.Fabric, mode: str, folder: str, saves: bool) -> tuple[int, Tensor, dict]:
    """Rank 0 waits for all others in a meeting; meanwhile rank 2 is killed, and another one comes."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    saved: dict = {}

    def step() -> None:
        optimizer.zero_grad()
        model(slope_of(fabric.rank)).backward()
        optimizer.step()

    step()
    if fabric.rank == 2 and not fabric.incarnation:
        wait_for(folder, "meets")
        die()
    if fabric.rank == 0:
        tell(folder, "meets")
    if fabric.rank == 2:
        tell(folder, "entered")
        time.sleep(0.5)
    if fabric.rank == 1:
        wait_for(folder, "entered")
    if saves:
        saved = sync.state_dict()
    else:
        sync.drain()
    place = model.first.detach().clone()
    sync.close()
    return fabric.incarnation, place, saved.get("shards", {}).get("parameters", {})


def come_too_late(fabric: syncline.Fabric, mode: str, folder: str) -> float:
    """A newcomer that begins when all servers have ended."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    if fabric.incarnation:
        wait_for(folder, *(f"rank {rank} has ended" for rank in range(fabric.world) if rank != 2))
    started = time.monotonic()
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    for step in range(4):
        if step == 2 and fabric.rank == 2:
            die()
        optimizer.zero_grad()
        model(slope_of(fabric.rank)).backward()
        optimizer.step()
    sync.drain()
    sync.close()
    tell(folder, f"rank {fabric.rank} has ended")
    if fabric.rank == 1:
        time.sleep(1.0)  # somebody is still there, so a newcomer is worth starting
    return time.monotonic() - started


def load_a_checkpoint(fabric: syncline.Fabric, folder: str) -> tuple[int, Tensor, list[Update]]:
    """A script that begins with a checkpoint begins with it in every process."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async:share=false,apart=true")
    if sync.serve():
        updates = list(sync.driver.server.updates)
        sync.close()
        return 0, torch.zeros(0), updates
    path = Path(folder, f"state {fabric.rank}")
    if not path.exists():
        torch.save(sync.state_dict(), path)
    sync.load_state_dict(torch.load(path, weights_only=True))
    for step in range(4):
        if step == 2 and fabric.rank == 0 and not fabric.incarnation:
            die()
        optimizer.zero_grad()
        model(slope_of(fabric.rank)).backward()
        optimizer.step()
    if fabric.rank == 0:
        tell(folder, "done")
    wait_for(folder, "done")
    sync.drain()
    place = model.first.detach().clone()
    sync.close()
    return fabric.incarnation, place, []


# What must come of it


def servers_of(mode: str, world: int) -> list[int]:
    """Ranks that serve, as the mode says."""
    count = 2 if "servers=2" in mode else 1
    return list(range(world - count, world)) if "apart" in mode else list(range(count))


def assert_replaced(reports: list[Report], work: Replaced) -> None:
    """The newcomer began with what the servers had, made all of its steps, and all workers ended equal."""
    servers = servers_of(work.mode, len(reports))
    newcomer = reports[work.victim]
    assert newcomer.incarnation == len(work.ends)
    assert newcomer.began >= 1
    assert newcomer.marks == (10 + servers[0], 20.0 + servers[0])
    assert sorted(newcomer.taken) == servers
    for server, (version, digest) in newcomer.taken.items():
        assert version > 0
        assert reports[server].digests[work.victim, version] == digest
        steps = [update.step for update in reports[server].updates if update.worker == work.victim]
        assert steps[-work.steps :] == [newcomer.began + 1 + step for step in range(work.steps)]
        assert steps.count(newcomer.began + 1) <= 2  # the one that died may have come as far
    workers = [report for rank, report in enumerate(reports) if "apart" not in work.mode or rank not in servers]
    assert all(torch.equal(worker.place, newcomer.place) for worker in workers)
    if work.codec == "none" and len(servers) == 1:
        assert torch.equal(newcomer.place, expected_place(reports[servers[0]].updates))
