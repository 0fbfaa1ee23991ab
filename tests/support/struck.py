"""What ranks of a job with servers do in tests when one of them is killed or stopped. Light: ranks import it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import SGD

import syncline
from support.on_a_line import RATE, Line, slope_of
from support.outcomes import Outcome, outcome_of
from support.striking import strike_before
from support.telling import PATIENCE_S
from syncline.modes.serving import client as client_module
from syncline.modes.serving.attendant import Attendant
from syncline.modes.serving.server import Server

MOMENTS = ("computing", "before commit", "waiting", "reading")


@dataclass(frozen=True)
class Strike:
    """What befalls a rank in a step, and when in it."""

    victim: int
    moment: str
    stops: bool = False  # for good, instead of being killed
    step: int = 3

    def now(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP if self.stops else signal.SIGKILL)
        time.sleep(60)

    def arm(self) -> None:
        """In the process of the victim, before the optimizer's step."""
        if self.moment == "reading":
            client_module.write = lambda *_: self.now()

    def befall(self, process: int, server: Server) -> None:
        """From the rank that serves, when the victim waits for it; return when the server is aware of what it can."""
        assert server.wait(lambda: self.victim in server.round, PATIENCE_S)
        os.kill(process, signal.SIGSTOP if self.stops else signal.SIGKILL)
        assert self.stops or server.wait(lambda: self.victim not in server.workers, PATIENCE_S)


def survive(fabric: syncline.Fabric, mode: str, strike: Strike, steps: int) -> tuple[Tensor, float]:
    """Constant gradients, and a worker that is struck; where the others end, and how long it took."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    processes = fabric.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    began = time.monotonic()
    if not sync.serve():
        for step in range(steps):
            is_due = step == strike.step
            optimizer.zero_grad()
            if is_due and fabric.rank == strike.victim and strike.moment == "computing":
                strike.now()
            if is_due and strike.moment == "waiting" and sync.driver.server is not None:
                strike.befall(processes[strike.victim], sync.driver.server)
            model(slope_of(fabric.rank)).backward()
            if is_due and fabric.rank == strike.victim:
                if strike.moment == "before commit":
                    strike.now()
                strike.arm()
            optimizer.step()
        sync.drain()
    took_s = time.monotonic() - began
    sync.close()
    return model.first.detach().clone(), took_s


def lose_a_server(fabric: syncline.Fabric, mode: str, victim: int) -> Outcome:
    """A server is killed while all others train: what they are told, after how long, with the time to close."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    if fabric.rank == victim:
        threading.Timer(0.3, Strike(victim, "").now).start()
    if sync.serve():
        return Outcome("served", None, "", 0.0)

    def train() -> None:
        until = time.monotonic() + 20.0
        while time.monotonic() < until:
            optimizer.zero_grad()
            model(slope_of(fabric.rank)).backward()
            optimizer.step()

    found = outcome_of(train)
    began = time.monotonic()
    sync.close()
    return replace(found, seconds=found.seconds + time.monotonic() - began)


HALTS = ("idle", "staging", "committing", "reading", "giving")  # what a server does when it is stopped


@dataclass(frozen=True)
class Halt:
    """A server's process is stopped, for a while or for good."""

    victim: int
    moment: str
    folder: str
    lasts_s: float = float("inf")

    def arm(self) -> None:
        """In the process of the victim."""
        if self.moment == "idle":
            threading.Timer(0.3, self.now).start()
        methods = {"staging": "stage", "committing": "commit", "reading": "read"}
        if self.moment in methods:
            strike_before(Server, methods[self.moment], self.now, call=10)
        if self.moment == "giving":
            strike_before(Attendant, "expect", self.now, call=10)  # where workers read in place
            strike_before(Attendant, "told_of", self.now, call=10)  # where parameters are sent

    def now(self) -> None:
        partly = Path(self.folder, "halting")
        partly.write_text(json.dumps([os.getpid(), time.monotonic()]))
        partly.rename(self.file)
        os.kill(os.getpid(), signal.SIGSTOP)

    @property
    def file(self) -> Path:
        return Path(self.folder, "halted")

    def when(self) -> tuple[int, float]:
        """The process, and when it was stopped."""
        process, moment = json.loads(self.file.read_text())
        return process, moment

    def let_go_on(self) -> None:
        """In a thread of another process: wait for it, and end it in time."""
        while not self.file.exists():
            time.sleep(0.01)
        process, moment = self.when()
        time.sleep(max(0.0, moment + self.lasts_s - time.monotonic()))
        os.kill(process, signal.SIGCONT)


def halt_a_server(fabric: syncline.Fabric, mode: str, halt: Halt) -> Outcome | None:
    """All train; a server is stopped. What each worker is told and how long after that, or None if nothing."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    waker = max(rank for rank in sync.driver.plan.roles.workers if rank != halt.victim)
    if fabric.rank == halt.victim:
        halt.arm()
    if fabric.rank == waker and halt.lasts_s < float("inf"):
        threading.Thread(target=halt.let_go_on, daemon=True).start()
    if sync.serve():
        return None

    def train() -> None:
        until = time.monotonic() + 20.0
        after = 0
        while after < 40 and time.monotonic() < until:  # steps when it goes on
            optimizer.zero_grad()
            model(slope_of(fabric.rank)).backward()
            optimizer.step()
            time.sleep(0.002)
            if halt.file.exists() and time.monotonic() > halt.when()[1] + min(halt.lasts_s, 100.0):
                after += 1
        sync.drain()

    found = outcome_of(train)
    process, stopped = halt.when()
    told_s = time.monotonic() - stopped
    if fabric.rank == waker and halt.lasts_s == float("inf"):
        time.sleep(1.0)  # the others are told without this
        os.kill(process, signal.SIGKILL)
    sync.close()
    return replace(found, seconds=told_s) if found.kind != "nothing" else None
