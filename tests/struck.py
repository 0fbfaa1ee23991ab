"""What ranks of a job with servers do in tests when one of them is killed or stopped. Light: ranks import it."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, replace

from served import RATE, Line, slope_of
from torch import Tensor
from torch.optim import SGD
from workers import Outcome, outcome_of

import syncline
from syncline.modes.serving import client as client_module

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
        if self.moment == "waiting":
            threading.Timer(0.4, self.now).start()
        if self.moment == "reading":
            client_module.write = lambda *_: self.now()


def survive(fabric: syncline.Fabric, mode: str, strike: Strike, steps: int) -> tuple[Tensor, float]:
    """Constant gradients, and a worker that is struck; where the others end, and how long it took."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    began = time.monotonic()
    if not sync.serve():
        for step in range(steps):
            is_due = step == strike.step
            optimizer.zero_grad()
            if is_due and fabric.rank == strike.victim and strike.moment == "computing":
                strike.now()
            if is_due and fabric.rank != strike.victim and strike.moment == "waiting":
                time.sleep(1.0)
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
