"""A rank of a job with parameter servers: a worker, a server, or both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic_ns
from typing import Any

from syncline.codecs.codec import Codec
from syncline.core.message import write_message
from syncline.core.status import PassStatus
from syncline.errors import ConfigError, FabricError, PairingError, SynclineError
from syncline.guards.fingerprint import NO_FINGERPRINT, Fingerprint
from syncline.modes.mode import Driver
from syncline.modes.replica import Replica
from syncline.modes.serving.client import Client
from syncline.modes.serving.link import FabricLink, Link, LocalLink, Message
from syncline.modes.serving.marks import Marks
from syncline.modes.serving.optimizers import ServedGroups, groups_of, refuse_shared_memory, refuse_wrappers
from syncline.modes.serving.push import PushPath
from syncline.modes.serving.server import Rules, Server
from syncline.modes.serving.service import Service
from syncline.modes.serving.shards import Roles, deal, merged
from syncline.modes.staleness import Staleness
from syncline.path.bucket import Slot
from syncline.path.path import Path
from syncline.reducer.layout import group_slots
from syncline.reducer.parameters import sparse_names
from syncline.reducer.reducer import Reducer, ReducerConfig
from syncline.replica.optimizer_steps import Step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """How a job is served."""

    roles: Roles
    rules: Rules
    pull: Codec  # for parameters on their way to workers


class ServedDriver(Driver):
    """One rank of it."""

    def __init__(self, replica: Replica, plan: Plan) -> None:
        super().__init__(replica)
        self.plan = plan
        self.rank = replica.fabric.rank
        self.steps = 0
        self.problem = ""
        self.failure: FabricError | None = None  # of a server, after which there is no talking to any
        self.marks = Marks()
        self.groups = ServedGroups(replica.optimizers)
        sparse = sparse_names(replica.model)
        if sparse:
            raise PairingError(f"{min(sparse)} has sparse gradients, which servers do not take; use mode=sync")
        refuse_wrappers(replica.optimizers)
        self.buckets = self.make_buckets()
        sizes = [sum(slot.parameter.nbytes for slot in slots) for slots in self.buckets.values()]
        self.server_of = deal(sizes, plan.roles.servers)
        shared = replica.fabric.name != "torch" and replica.fabric.device.type == "cpu"
        if replica.fabric.incarnation and self.rank in plan.roles.servers:
            raise ConfigError(
                f"rank {self.rank} is a server, and the parameters that it had were lost with it; only a worker's "
                f"place can be taken: start all ranks again from the last checkpoint"
            )
        self.service = self.start_service(shared) if self.rank in plan.roles.servers else None
        self.links: dict[int, Link] = {}  # to servers
        self.connect()
        self.clients = {server: self.client_of(server, link, shared) for server, link in self.links.items()}
        self.has_left = False
        if self.is_worker:
            self.push = self.start_pushing()
            self.talk(self.rejoin if replica.fabric.incarnation else self.enter, "entering")
        replica.fabric.before_close.append(self.before_fabric_closes)

    @property
    def server(self) -> Server | None:
        """Of this rank, if it serves."""
        return self.service.server if self.service is not None else None

    @property
    def is_worker(self) -> bool:
        """Whether this rank trains."""
        return self.rank in self.plan.roles.workers

    # Setting up

    def bucket_bytes(self) -> int:
        """Small enough that every server has something to do."""
        total = sum(p.nbytes for _, p in self.replica.named() if p.requires_grad)
        return min(self.replica.settings.bucket_bytes, max(1, -(-total // len(self.plan.roles.servers))))

    def make_buckets(self) -> dict[int, list[Slot]]:
        """The same on all ranks, workers or not."""
        slots = [Slot(name, p, is_sparse=False) for name, p in self.replica.named() if p.requires_grad]
        refuse_shared_memory(slots)
        most = self.bucket_bytes()
        first = min(self.replica.settings.first_bucket_bytes, most)
        return dict(enumerate(group_slots(slots[::-1], first, most)))

    def start_service(self, shared: bool) -> Service:
        """Of the parameters that this rank serves."""
        mine = {number: slots for number, slots in self.buckets.items() if self.server_of[number] == self.rank}
        plan = self.plan
        return Service(self.replica, mine, plan.roles.workers, plan.rules, plan.pull, shared)

    def connect(self) -> None:
        """A link between every server and every worker."""
        for server, worker in self.plan.roles.pairs(self.rank):
            if server == worker:
                here, there = LocalLink.pair(self.rank, self.replica.fabric.deadlines.operation)
                self.links[server] = here
                self.attend(worker, there)
                continue
            fabric = self.replica.fabric
            membership = fabric.membership if fabric.incarnation else None
            pair = membership.rejoin(fabric, server) if membership else fabric.subgroup([server, worker])
            if self.rank == worker:
                self.links[server] = FabricLink(pair, server)
            else:
                self.attend(worker, FabricLink(pair, worker))

    def attend(self, worker: int, link: Link) -> None:
        """Serve a worker."""
        assert self.service is not None
        self.service.attend(worker, link)

    def client_of(self, server: int, link: Link, shared: bool) -> Client:
        """This worker's side of a server."""
        theirs = {number: slots for number, slots in self.buckets.items() if self.server_of[number] == server}
        return Client(link, theirs, self.plan.pull, self.replica.settings.seed, self.rank, shared)

    def start_pushing(self) -> PushPath:
        """Watch gradients, and push buckets as they become full."""
        replica, settings = self.replica, self.replica.settings
        push = PushPath(replica, self.links, self.server_of)
        most = self.bucket_bytes()
        planned = replace(settings.plan(), first_bucket_bytes=min(settings.first_bucket_bytes, most), bucket_bytes=most)
        config = ReducerConfig(planned, settings.accumulate, fixed=True)
        self.reducer = Reducer(replica.fabric, push, replica.named(), set(), config, self)
        return push

    # In the user's loop

    def before_round(self) -> None:
        if self.reducer is None:
            raise ConfigError(
                f"rank {self.rank} is a server and does not train; write `if not sync.serve():` before the loop"
            )
        self.refuse_scaled()
        self.groups.check({id(parameter): name for name, parameter in self.replica.named()})
        self.reducer.before_step()
        if self.has_left:
            self.talk(self.enter, "entering again")
        self.push_what_changed(self.reducer)

    def makes_step(self) -> Step:
        return Step.ELSEWHERE

    def refuse_scaled(self) -> None:
        """A fused optimizer unscales gradients itself, where servers cannot see by how much."""
        if any(getattr(optimizer, "grad_scale", None) is not None for optimizer in self.replica.optimizers):
            raise ConfigError(
                "servers need unscaled gradients; call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )

    def fingerprint(self, number: int) -> Fingerprint:
        """Servers hold the parameters, so there is nothing to compare."""
        return NO_FINGERPRINT

    def also_synchronize(self) -> None:
        """Workers say nothing to each other."""

    def pass_ended(self, status: PassStatus) -> str:
        """A backward pass has ended, and its gradients are at the servers, staged."""
        assert self.reducer is not None
        self.new_gradients()
        if not self.push.holds:
            self.marks.take(self.reducer.layout.buckets)
        self.problem = self.what_is_wrong(status.failed, status.nonfinite)
        return self.problem

    def what_is_wrong(self, failed: bool, bad: tuple[int, ...]) -> str:
        """With this worker's gradients."""
        if failed:
            return "the backward pass failed"
        if bad:
            names = ", ".join(slot.name for slot in self.buckets[bad[0]][:3])
            return f"the gradient of one of {names} is not finite on rank {self.rank}"
        return ""

    def push_what_changed(self, reducer: Reducer) -> None:
        """Clipping and unscaling come after backward: then what was staged is staged again, from now on only once."""
        if not self.push.holds and not self.marks.have_changed(reducer.layout.buckets):
            return
        self.push.holds = False
        again = self.push.begin(reducer.passes)
        for bucket in reducer.layout.buckets:
            bucket.fill()
            self.push.start(again, bucket)
        status = self.push.wait(again)
        self.push.holds = True
        self.problem = self.problem or self.what_is_wrong(False, status.nonfinite)

    def after_round(self, skipped: bool) -> None:
        self.steps += 1
        self.talk(lambda: self.commit(good=not skipped), f"step {self.steps}")

    def talk(self, work: Callable[[], None], what: str) -> None:
        """Let the thread that talks to servers do something, and wait for it.

        When it fails, links may be in the middle of an exchange: they are broken, and it fails again from then on.
        """
        if self.failure is not None:
            raise self.failure
        waited_from_ns = monotonic_ns()
        try:
            self.push.submit(work, what).wait()
        except FabricError as error:
            self.failure = error
            self.break_links()
            raise
        self.replica.recorder.waited(waited_from_ns, monotonic_ns())

    def break_links(self) -> None:
        """Servers drop this worker."""
        for link in self.links.values():
            link.close()

    def commit(self, good: bool) -> None:
        """Tell all servers that the step is complete, and take their parameters."""
        groups = write_message(groups_of(self.replica.optimizers))
        for client in self.clients.values():
            client.commit(self.steps, good, groups)
        answers = self.take()
        for server, answer in answers.items():
            self.clients[server].staleness.append(answer.flag)
        applied = {server for server, answer in answers.items() if answer.step}
        self.push.commit(applied if good else set())

    def meet(self) -> None:
        """Wait until all workers are here, and take the parameters: all are equal then, and as far."""
        for client in self.clients.values():
            client.ask_to_meet(self.steps)
        self.steps = max(answer.step for answer in self.take().values())

    def take(self) -> dict[int, Message]:
        """Take the parameters that were asked for, as servers give them.

        While others are slow all servers say to wait, again and again: all are heard in turn, so that none waits for
        this worker, and one that has stopped is noticed.
        """
        answers: dict[int, Message] = {}
        while len(answers) < len(self.clients):
            for server, client in self.clients.items():
                if server not in answers and (answer := client.take()) is not None:
                    answers[server] = answer
        return answers

    def enter(self) -> None:
        """Come, or come again; the clock is that of the slowest."""
        states = self.push.states_of(self.buckets)
        for client in self.clients.values():
            self.steps = max(client.enter(states), 0 if self.has_left else self.steps)
        self.has_left = False

    def rejoin(self) -> None:
        """In the place of a worker that died: with all that the others had at the start and have learned since."""
        first = next(iter(self.clients.values()))
        first.introduce(self.replica.layout(), self.replica.unserved())
        self.enter()
        self.pull()

    def leave(self, comes_back: bool = False) -> None:
        """Nobody waits for this worker any more."""
        if not self.has_left:
            self.has_left = True
            for client in self.clients.values():
                client.leave(comes_back)

    # What the user calls

    @contextmanager
    def away(self) -> Iterator[None]:
        self.talk(lambda: self.leave(comes_back=True), "leaving")
        try:
            yield
        finally:
            self.talk(self.enter, "entering again")
            self.talk(self.pull, "taking parameters")

    def pull(self) -> None:
        """Take the parameters as they are, without a gradient."""
        for client in self.clients.values():
            client.ask_to_pull(self.steps)
        self.take()

    def drain(self) -> None:
        if self.is_worker and not self.has_left:
            self.talk(self.meet, "meeting the other workers")

    def serve(self) -> bool:
        if self.is_worker:
            return False
        assert self.service is not None
        self.service.last()
        return True

    def staleness(self) -> Staleness:
        return Staleness.of([tau for client in self.clients.values() for tau in client.staleness])

    def paths(self) -> list[Path]:
        return [self.push] if self.is_worker else []

    # To be saved and restored

    def state_dict(self) -> dict[str, Any]:
        """Workers meet; the first of them saves what the servers have."""
        saved: dict[str, Any] = {"steps": 0, "passes": 0, "good_passes": 0, "codec_state": {}, "shards": {}}
        if self.reducer is None:
            return saved
        self.drain()
        saved |= {"steps": self.steps, "passes": self.reducer.passes, "good_passes": self.push.good_passes}
        if self.rank == self.plan.roles.workers[0]:
            self.talk(lambda: saved["shards"].update(self.fetch()), "saving")
        saved["codec_state"] = self.push.state_dict()
        return saved

    def fetch(self) -> dict[str, Any]:
        """What all servers have, as one."""
        return merged([client.save() for client in self.clients.values()])

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The worker that has the state of the servers gives it to them; all take the parameters."""
        if self.reducer is None:
            return
        if self.replica.fabric.incarnation:
            log.warning("rank %d came later, and goes on from what the servers have: not from a checkpoint", self.rank)
            return
        self.steps = saved["steps"]
        self.reducer.passes = self.reducer.passes_before_step = saved["passes"]
        self.push.good_passes = saved["good_passes"]
        self.push.load_state_dict(saved["codec_state"])
        self.talk(lambda: self.restore(saved["shards"]), "loading")

    def restore(self, shards: dict[str, Any]) -> None:
        """In the thread that talks to servers."""
        if shards:
            for client in self.clients.values():
                client.load(shards)
        steps = self.steps
        self.enter()
        self.steps = steps
        self.meet()

    # At the end

    def finish(self) -> None:
        """Let the others go on without this worker, and serve them to the end."""
        if self.is_worker and not self.has_left and self.failure is None:
            with suppress(SynclineError):
                self.push.thread.in_turn(self.leave)  # at the end of a script no thread takes anything up any more
        self.has_left = True
        if self.service is not None:
            self.service.last()

    def before_fabric_closes(self, drain: bool) -> None:
        """A rank that has come to its end does what `close` does; one that has failed breaks its links."""
        if drain:
            self.finish()
        self.close()

    def close(self) -> None:
        self.break_links()
        if self.service is not None:
            self.service.end_talks()
        if self.reducer is not None:
            self.reducer.close()
        if self.service is not None:
            self.service.close()
