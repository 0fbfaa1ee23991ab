"""Servers: what is read is whole, and what is pushed counts once."""

from __future__ import annotations

import threading
import time
from functools import partial
from math import inf

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import syncline
from support.on_a_line import (
    RATE,
    START,
    Descent,
    Line,
    away_and_back,
    gone,
    scaled,
    slope_of,
    slopes_drawn,
)
from support.patience import within
from support.served import (
    LOCKSTEP,
    How,
    equal,
    load,
    resumed,
    save,
)
from syncline.codecs.registry import codec_of
from syncline.modes.serving.client import Client
from syncline.modes.serving.link import Kind, Message
from syncline.modes.serving.optimizers import groups_of
from syncline.modes.serving.server import Rules, Server
from syncline.path.bucket import Slot

# Reading in place


def test_nothing_changes_while_a_worker_reads_but_one_that_is_late_is_not_waited_for() -> None:
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    slots = [Slot(name, p, is_sparse=False) for name, p in model.named_parameters()]
    server = Server(0, {0: slots}, [optimizer], [0, 1], Rules(inf, False, False, 0.0), shared=False, deadline_s=2.0)
    commit = partial(server.commit, 1, good=True, groups=groups_of([optimizer]))
    version, _ = server.lend(0)
    other = threading.Thread(target=commit, args=(1,))
    other.start()
    other.join(0.2)
    assert server.version == version
    server.give_back(0)
    other.join(5.0)
    assert server.version == version + 1
    _, until_ns = server.lend(0)
    commit(2)
    assert time.monotonic_ns() >= until_ns
    assert server.version == version + 2
    server.close()


def test_a_worker_that_enters_after_a_push_has_what_all_began_with() -> None:
    """So its first gradient is as stale as there were pushes; one that left and came again has read since."""
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    slots = [Slot(name, p, is_sparse=False) for name, p in model.named_parameters()]
    server = Server(0, {0: slots}, [optimizer], [0, 1], Rules(inf, False, False, 0.5), shared=False, deadline_s=2.0)
    began = [p.clone() for p in server.parameters.values()]
    gradients = {slot.name: torch.ones(slot.parameter.numel()) for slot in slots}
    server.enter(0)
    server.stage(0, 0, lambda: dict(gradients))
    assert server.commit(0, 1, good=True, groups=groups_of([optimizer])) == 0
    server.enter(1)
    assert equal([*server.workers[1].read.values()], began)
    assert server.commit(1, 1, good=True, groups=groups_of([optimizer])) == 1
    server.leave(1, comes_back=True)
    server.enter(1)
    assert not equal([*server.workers[1].read.values()], began)
    assert server.commit(1, 2, good=True, groups=groups_of([optimizer])) == 0
    server.close()


class Lender:
    """A server's end of a link that lends until the times given."""

    peer = 0

    def __init__(self, *until_ns: int) -> None:
        self.until_ns = list(until_ns)
        self.heard: list[tuple[Kind, int]] = []

    def send(self, message: Message, deadline_s: float | None = None) -> None:
        self.heard.append((message.kind, message.flag))

    def receive(self, deadline_s: float | None = None) -> Message:
        return Message(Kind.ANSWER, flag=self.until_ns.pop(0))

    def close(self) -> None:
        """Nothing is open."""


def test_a_worker_that_was_too_slow_reads_again() -> None:
    now = time.monotonic_ns()
    link = Lender(now - 1, now + 10**11)
    client = Client(link, {}, codec_of("none"), seed=0, worker=1, same_machine=True)
    client.read_in_place()
    assert link.heard == [(Kind.READ, 0), (Kind.TAKEN, 1), (Kind.READ, 0), (Kind.TAKEN, 0)]


# Nothing is lost, nothing is applied twice


@pytest.mark.parametrize("mode", ["async", "bounded:ahead=2", "async:servers=2", "async:servers=2,apart=true"])
def test_every_commit_counts_once(mode: str) -> None:
    workers, steps = 4, 20
    world = workers + 2 * ("apart" in mode)
    found = syncline.run(Descent(mode, (steps,) * workers, delays_s=0.01), ranks=world, fabric="threads")
    wanted = gone(sum(slope_of(rank) * steps for rank in range(workers)) / workers)
    for place, _ in found[:workers]:
        assert torch.equal(place, wanted)


@pytest.mark.parametrize("mode", ["async:share=false", "bounded:ahead=0", "bounded:ahead=1,share=false"])
@pytest.mark.parametrize("drain", [True, False])
def test_workers_with_fewer_batches_do_not_hold_up_the_others(mode: str, drain: bool) -> None:
    """Whether they leave, or wait in drain()."""
    steps = (12, 3, 8)
    setup = Descent(mode, steps, drain=drain)
    found = syncline.run(setup, ranks=3, fabric="threads", deadlines=syncline.Deadlines(20.0))
    slopes = sum(slope_of(rank) * count for rank, count in enumerate(steps))
    if mode == LOCKSTEP:
        at_work = [[rank for rank in range(3) if steps[rank] > step] for step in range(max(steps))]
        slopes = sum(sum(map(slope_of, ranks)) / len(ranks) for ranks in at_work)
    torch.testing.assert_close(found[0][0], gone(slopes))
    if drain:
        assert all(torch.equal(place, found[0][0]) for place, _ in found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["async:share=false", LOCKSTEP, "bounded:ahead=1,share=false,servers=2"])
def test_a_worker_that_was_away_has_the_parameters_of_today_and_nobody_waited(mode: str) -> None:
    """It is away for longer than the deadline."""
    steps, world = 5, 3
    deadline_s, gate = within(2.0, most=15.0), threading.Barrier(world, timeout=60.0)
    work = partial(away_and_back, gate=gate, mode=mode, steps=steps, away_s=1.25 * deadline_s)
    found = syncline.run(work, ranks=world, fabric="threads", deadlines=syncline.Deadlines(deadline_s))
    others, all_of_them = slope_of(0) + slope_of(2), sum(map(slope_of, range(world)))
    if mode == LOCKSTEP:
        others, all_of_them = others / 2, all_of_them / 3
    back, _, _ = found[1]
    torch.testing.assert_close(back, torch.full((3,), START - RATE * (all_of_them + steps * others)))
    for _, place, _ in found:
        torch.testing.assert_close(place, torch.full((3,), START - RATE * (2 * all_of_them + steps * others)))
    assert max(took_s for _, _, took_s in found) < deadline_s / 2


def test_after_a_meeting_all_workers_are_as_far() -> None:
    """One made two steps before it and the other six; after it each makes four, in lockstep."""

    def work(fabric: syncline.Fabric) -> Tensor:
        model = Line()
        optimizer = SGD(model.parameters(), lr=RATE)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode=LOCKSTEP)
        for steps in ((2, 6)[fabric.rank], 4):
            for _ in range(steps):
                optimizer.zero_grad()
                model(slope_of(fabric.rank)).backward()
                optimizer.step()
            sync.drain()
        found = model.first.detach().clone()
        sync.close()
        return found

    both = (slope_of(0) + slope_of(1)) / 2
    for found in syncline.run(work, ranks=2, fabric="threads"):
        assert torch.equal(found, torch.full((3,), START - RATE * (6 * both + 4 * slope_of(1))))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["async:share=false", LOCKSTEP, f"{LOCKSTEP},servers=2"])
def test_waiting_for_slow_workers_has_no_deadline_as_long_as_they_are_heard_of(mode: str) -> None:
    """Workers wait in drain() for longer than the deadline, while another one makes many short steps."""
    found = syncline.run(
        Descent(mode, (1, 1, 60), delays_s=0.25),
        ranks=3,
        fabric="threads",
        deadlines=syncline.Deadlines(1.0),
    )
    assert torch.equal(found[0][0], found[1][0])


def test_a_nan_discards_the_push_of_its_worker_alone() -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, int]:
        model = Line()
        optimizer = SGD(model.parameters(), lr=RATE)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async:share=false,servers=2")
        for step in range(4):
            optimizer.zero_grad()
            model(float("nan") if (fabric.rank, step) == (1, 2) else slope_of(fabric.rank)).backward()
            optimizer.step()
        sync.drain()
        found, version = model.first.detach().clone(), sync.driver.server.version
        sync.close()
        return found, version

    for found, version in syncline.run(work, ranks=2, fabric="threads"):
        assert version == 7
        assert torch.equal(found, torch.full((3,), START - RATE * (4 * slope_of(0) + 3 * slope_of(1))))


@pytest.mark.parametrize("codec", ["powersgd:1", "rules:codec=(dgc:0.1,warmup=0),below=0"])
def test_a_parameter_that_a_worker_does_not_use_keeps_its_state_at_both_ends(codec: str) -> None:
    """What a codec remembers of it, and its momentum; the other parameter's goes on."""

    def work(fabric: syncline.Fabric) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        model = nn.ParameterDict({"often": torch.zeros(6, 8), "seldom": torch.zeros(6, 8)})
        optimizer = SGD(model.parameters(), lr=RATE)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async", codec=codec)
        draws = torch.Generator().manual_seed(0)
        ends = []
        for used in (["often", "seldom"], ["often"]):
            optimizer.zero_grad()
            sum((model[name] * torch.randn(6, 8, generator=draws)).sum() for name in used).backward()
            optimizer.step()
            ear = sync.driver.service.attendants[0].ears[0]
            ends.append((dict(sync.driver.push.store.states[0].state), dict(ear.state)))
        sync.close()
        return ends

    ((before, now),) = syncline.run(work, ranks=1, fabric="threads")
    for then, afterwards in zip(before, now, strict=True):
        assert {key for key in then if not torch.equal(then[key], afterwards[key])} <= {
            key for key in then if key.startswith("often/")
        }
    assert any(not torch.equal(before[0][key], now[0][key]) for key in before[0] if key.startswith("often/"))


@pytest.mark.parametrize("codec", ["int8", "topk:0.5", "onebit", "dgc:0.5,warmup=0"])
def test_a_gradient_that_is_too_large_for_a_codec_discards_the_push_of_its_worker_alone(codec: str) -> None:
    def work(fabric: syncline.Fabric) -> tuple[list[Tensor], int]:
        model = Line()
        optimizer = SGD(model.parameters(), lr=RATE)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async:share=false,servers=2", codec=codec)
        for step in range(4):
            optimizer.zero_grad()
            model(3e38 if (fabric.rank, step) == (1, 2) else slope_of(fabric.rank)).backward()
            optimizer.step()
        sync.drain()
        saved = sync.state_dict()["codec_state"]
        kept = [tensor for kind in ("residual", "state") for tensor in saved[kind].values()]
        found, version = [*kept, model.first.detach().clone()], sync.driver.server.version
        sync.close()
        return found, version

    for found, version in syncline.run(work, ranks=2, fabric="threads"):
        assert version == 7
        assert all(tensor.isfinite().all() and tensor.abs().max() < 1e6 for tensor in found)


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("codec", ["none", "topk:0.1", "int8"])
def test_sent_plus_kept_is_the_gradient_while_the_scale_of_the_loss_changes_and_one_overflows(
    codec: str, explicit: bool
) -> None:
    world, steps = 2, 6
    work = partial(scaled, steps=steps, infinite=3, codec=codec, explicit=explicit)
    found = syncline.run(work, ranks=world, fabric="threads")
    total = sum(slopes_drawn(rank, steps, 3 if rank == 1 else -1) for rank in range(world))
    for moved, _ in found:
        kept = sum(one for _, one in found)
        torch.testing.assert_close(moved + kept / world, RATE / world * total, rtol=1e-4, atol=2e-6)


# Checkpoints


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("codec", ["none", "topk:0.1", "powersgd:1", "int8:rounding=stochastic", "randomk:0.2"])
def test_a_run_that_goes_on_is_the_one_that_was_not_interrupted(codec: str, optimizer: str) -> None:
    how = How(f"{LOCKSTEP},servers=2", codec=codec, optimizer=optimizer)
    whole = syncline.run(partial(resumed, how=how, other="", stop=3), ranks=2, fabric="threads")
    again = syncline.run(partial(resumed, how=how, other=how.mode, stop=3), ranks=2, fabric="threads")
    assert all(equal(one, whole[0]) for one in [*whole, *again])


@pytest.mark.parametrize(("before", "after"), [("servers=1", "servers=3"), ("servers=2", "servers=1")])
def test_it_may_go_on_with_another_number_of_servers(before: str, after: str) -> None:
    how = How(f"{LOCKSTEP},{before}", optimizer="adamw")
    whole = syncline.run(partial(resumed, how=how, other="", stop=3), ranks=3, fabric="threads")
    again = syncline.run(partial(resumed, how=how, other=f"{LOCKSTEP},{after}", stop=3), ranks=3, fabric="threads")
    assert all(equal(one, whole[0]) for one in again)


@pytest.mark.parametrize("before", ["servers=2", "servers=1,apart=true"])
@pytest.mark.parametrize("codec", ["none", "topk:0.1"])
def test_it_may_go_on_with_another_number_of_ranks(before: str, codec: str) -> None:
    how = How(f"{LOCKSTEP},{before}", codec=codec)
    saved = syncline.run(partial(save, how=how, steps=4), ranks=3, fabric="threads")
    states = [state for state, _ in saved]
    for world in (2, 4):
        found = syncline.run(
            partial(load, how=How(LOCKSTEP, codec=codec), states=states[::-1], steps=0), ranks=world, fabric="threads"
        )
        for before_more, _, state in found:
            assert equal(before_more, saved[0][1])
            kept = [one["codec_state"]["residual"] for one in states if one["codec_state"]]
            for name in kept[0]:
                mean = torch.stack([one[name] for one in kept]).mean(0)
                torch.testing.assert_close(state["codec_state"]["residual"][name], mean)
    if codec == "none":
        more = [
            syncline.run(partial(load, how=How(LOCKSTEP), states=states, steps=3), ranks=world, fabric="threads")[0][1]
            for world in (1, 2, 4)
        ]
        for one in more[1:]:
            for a, b in zip(one, more[0], strict=True):
                torch.testing.assert_close(a, b)
