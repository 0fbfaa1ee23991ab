"""Modes with parameter servers: how stale, how exact, what survives, what is refused."""

from __future__ import annotations

import threading
import time
from functools import partial
from math import inf, pi, sin

import pytest
import torch
from models import Words, frozen_below, mlp
from served import (
    LOCKSTEP,
    LOOPS,
    MAKERS,
    RATE,
    START,
    STEPS,
    Descent,
    How,
    Line,
    Turns,
    away_and_back,
    equal,
    gone,
    in_single,
    in_turn,
    load,
    plain,
    read_and_hurry,
    resumed,
    save,
    scaled,
    slope_of,
    slopes_drawn,
    with_an_exception,
    with_nan,
)
from torch import Tensor, nn
from torch.optim import SGD

import syncline
from syncline.buckets.bucket import Slot
from syncline.codecs.registry import codec_of
from syncline.errors import ConfigError, PairingError, RankFailed
from syncline.modes.asynchronous import AsyncSGD
from syncline.modes.serving.client import Client
from syncline.modes.serving.clock import Clock
from syncline.modes.serving.link import Kind, Message
from syncline.modes.serving.optimizers import groups_of
from syncline.modes.serving.server import Rules, Server

CPU = torch.device("cpu")
DEADLINES = syncline.Deadlines(3.0, join=60.0)


# How stale


def threshold(staleness: int) -> float:
    """Of the rate of x' = x - rate * x, computed from an x that is so many updates old."""
    return 2 * sin(pi / (2 * (2 * staleness + 1)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_pushes_in_strict_turn_are_as_stale_as_there_are_other_workers(world: int) -> None:
    rounds, found = 400 // world, {}
    for part in (0.98, 1.02):
        rate = part * threshold(world - 1)
        work = partial(in_turn, turns=Turns(world), mode="async:share=false", rate=rate, rounds=rounds)
        by_rank = syncline.run(work, ranks=world, fabric="threads")
        x = [1.0] * world
        for _ in range(world * rounds):
            x.append(x[-1] - rate * x[-world])
        for rank, (path, staleness) in enumerate(by_rank):
            assert path == pytest.approx(x[world + rank :: world], rel=1e-6, abs=1e-9)
            first = {} if rank == world - 1 else {rank: 1}  # nobody had pushed before the first turn of rank 0
            assert staleness == {**first, world - 1: rounds - len(first)}
        found[part] = max(abs(path[-1]) for path, _ in by_rank)
    assert found[0.98] < 0.6
    assert found[1.02] > 1.8


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_no_worker_reads_further_ahead_of_the_slowest_than_the_bound_and_the_bound_is_reached(ahead: int) -> None:
    work = partial(read_and_hurry, mode=f"bounded:ahead={ahead}", steps=14, slow=2, seconds=0.02)
    reads, *_ = syncline.run(work, ranks=3, fabric="threads")
    assert len(reads) == 3 * (1 + 14 + 1)
    assert max(read.clock - read.slowest for read in reads) == ahead


def test_without_a_bound_workers_go_further() -> None:
    work = partial(read_and_hurry, mode="async", steps=14, slow=2, seconds=0.02)
    reads, *_ = syncline.run(work, ranks=3, fabric="threads")
    assert max(read.clock - read.slowest for read in reads) > 4


def test_damping_divides_by_one_plus_the_staleness() -> None:
    world, rate, rounds = 3, 0.25, 20
    work = partial(in_turn, turns=Turns(world), mode="async:share=false,damping=true", rate=rate, rounds=rounds)
    by_rank = syncline.run(work, ranks=world, fabric="threads")
    x = [1.0] * world
    for number in range(world * rounds):
        x.append(x[-1] - rate / (1 + min(number, world - 1)) * x[-world])
    for rank, (path, _) in enumerate(by_rank):
        assert path == pytest.approx(x[world + rank :: world], rel=1e-12)


def test_compensation_adds_the_first_order_change_and_leaves_the_gradients_of_the_worker_alone() -> None:
    world, rate, rounds, much = 2, 0.25, 20, 0.5
    mode = f"async:share=false,compensation={much}"
    by_rank = syncline.run(
        partial(in_turn, turns=Turns(world), mode=mode, rate=rate, rounds=rounds), ranks=world, fabric="threads"
    )
    x = [1.0] * world
    for _ in range(world * rounds):
        gradient = x[-world]
        x.append(x[-1] - rate * (gradient + much * gradient**2 * (x[-1] - x[-world])))
    for rank, (path, _) in enumerate(by_rank):
        assert path == pytest.approx(x[world + rank :: world], rel=1e-12)


# Lockstep is synchronous SGD


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("servers", ["servers=1", "servers=2"])
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_with_a_bound_of_0_it_is_synchronous_bit_for_bit(world: int, servers: str, optimizer: str) -> None:
    wanted = syncline.run(partial(plain, how=How("sync", optimizer=optimizer)), ranks=world, fabric="threads")
    how = How(f"{LOCKSTEP},{servers}", optimizer=optimizer)
    for found in syncline.run(partial(plain, how=how), ranks=world, fabric="threads"):
        assert equal(found, wanted[0])


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("workers", [1, 3])
def test_servers_apart_do_the_same(workers: int, optimizer: str) -> None:
    wanted = syncline.run(partial(plain, how=How("sync", optimizer=optimizer)), ranks=workers, fabric="threads")
    how = How(f"{LOCKSTEP},servers=2,apart=true", optimizer=optimizer)
    found = syncline.run(partial(plain, how=how), ranks=workers + 2, fabric="threads")
    assert all(equal(one, wanted[0]) for one in found[:workers])


@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.1"])
def test_lockstep_is_deterministic(codec: str) -> None:
    how = How(f"{LOCKSTEP},servers=2", codec=codec)
    first, again = (syncline.run(partial(in_single, how=how), ranks=3, fabric="threads") for _ in range(2))
    assert all(equal(one, first[0]) for one in [*first, *again])


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_every_loop_does_what_it_does_in_step(name: str, optimizer: str) -> None:
    loop = LOOPS[name]
    wanted = syncline.run(partial(loop, how=How("sync", optimizer=optimizer)), ranks=2, fabric="threads")
    found = syncline.run(
        partial(loop, how=How(f"{LOCKSTEP},servers=2", optimizer=optimizer)), ranks=2, fabric="threads"
    )
    assert all(equal(one, wanted[0]) for one in found)


@pytest.mark.parametrize("codec", ["topk:0.1", "int8", "onebit", "powersgd:1"])
def test_a_step_that_all_skip_leaves_what_is_kept_and_the_state_of_codecs_alone(codec: str) -> None:
    """The worker that was not at fault had pushed already: it is as if the step had not been."""

    def without_the_step(fabric: syncline.Fabric) -> list[Tensor]:
        how = How(LOCKSTEP, codec=codec, optimizer="sgd")
        return with_nan(fabric, how)

    def never_was(fabric: syncline.Fabric) -> list[Tensor]:
        return steps_without(fabric, How(LOCKSTEP, codec=codec, optimizer="sgd"), 2)

    found = syncline.run(without_the_step, ranks=2, fabric="threads")
    wanted = syncline.run(never_was, ranks=2, fabric="threads")
    assert equal(found[0], wanted[0])
    assert equal(found[0], found[1])


def steps_without(fabric: syncline.Fabric, how: How, left_out: int) -> list[Tensor]:
    """The loop of `with_nan` without one of its steps."""
    from batches import Batch
    from served import fill, one_step, values_of

    model = fill(mlp(torch.float32), seed=fabric.rank)
    optimizer = how.make(model.parameters())
    sync = how.sync(fabric, model, optimizer)
    for step in range(STEPS):
        if step != left_out:
            one_step(model, optimizer, Batch(fabric.rank, step))
    sync.close()
    return values_of(model)


@pytest.mark.parametrize("where", ["in forward", "before all gradients", "after most gradients", "after all gradients"])
def test_an_exception_of_one_worker_costs_one_step(where: str) -> None:
    loop = partial(with_an_exception, where=where)
    wanted = syncline.run(partial(loop, how=How("sync")), ranks=2, fabric="threads")
    found = syncline.run(partial(loop, how=How(LOCKSTEP)), ranks=2, fabric="threads")
    assert all(equal(one, wanted[0]) for one in found)


def test_parameters_that_no_worker_uses_have_no_state_at_the_server() -> None:
    def work(fabric: syncline.Fabric) -> set[str]:
        model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
        optimizer = MAKERS["adamw"](model.parameters())
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async")
        for _ in range(2):
            optimizer.zero_grad()
            model["used"](torch.ones(1, 2)).sum().backward()
            optimizer.step()
        sync.drain()
        server = sync.driver.server
        names = set().union(*(server.optimizer_state(one) for one in server.optimizers)) if server else set()
        sync.close()
        return names

    assert syncline.run(work, ranks=2, fabric="threads")[0] == {"used.weight", "used.bias"}


def test_a_worker_that_is_slow_to_come_is_in_the_first_round() -> None:
    """The others have committed their first step before it has entered."""
    entered = Clock([0, 1], 0)
    entered.tick(0, 1)
    assert entered.enter(1) == 0
    assert entered.enter(0) == 1


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
    deadlines = syncline.Deadlines(2.0)
    work = partial(away_and_back, gate=threading.Barrier(world, timeout=20.0), mode=mode, steps=steps, away_s=2.5)
    found = syncline.run(work, ranks=world, fabric="threads", deadlines=deadlines)
    others, all_of_them = slope_of(0) + slope_of(2), sum(map(slope_of, range(world)))
    if mode == LOCKSTEP:
        others, all_of_them = others / 2, all_of_them / 3
    back, _, _ = found[1]
    torch.testing.assert_close(back, torch.full((3,), START - RATE * (all_of_them + steps * others)))
    for _, place, _ in found:
        torch.testing.assert_close(place, torch.full((3,), START - RATE * (2 * all_of_them + steps * others)))
    assert max(took_s for _, _, took_s in found) < 1.0


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
            kept = [one["codec_state"]["kept"] for one in states if one["codec_state"]]
            for name in kept[0]:
                mean = torch.stack([one[name] for one in kept]).mean(0)
                torch.testing.assert_close(state["codec_state"]["kept"][name], mean)
    if codec == "none":
        more = [
            syncline.run(partial(load, how=How(LOCKSTEP), states=states, steps=3), ranks=world, fabric="threads")[0][1]
            for world in (1, 2, 4)
        ]
        for one in more[1:]:
            for a, b in zip(one, more[0], strict=True):
                torch.testing.assert_close(a, b)


# Refusals


def start(model: nn.Module, ranks: int = 2, **settings: str) -> BaseException:
    def work(fabric: syncline.Fabric) -> None:
        syncline.Sync(model, SGD(model.parameters(), lr=0.1), fabric=fabric, **settings)

    with pytest.raises(RankFailed) as failed:
        syncline.run(work, ranks=ranks, fabric="threads")
    return failed.value.failures[0]


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"mode": "async:servers=0"}, ConfigError, "servers=0 is less than 1"),
        ({"mode": "async:servers=3"}, ConfigError, "try servers=2"),
        ({"mode": "async:servers=2,apart=true"}, ConfigError, "start 3 ranks or more"),
        ({"mode": "bounded:ahead=-1"}, ConfigError, "try bounded:ahead=4"),
        ({"mode": "async:compensation=-1"}, ConfigError, "try 0.04"),
        ({"mode": "async:pull=(dgc)"}, PairingError, "try pull=int8"),
        ({"mode": "async:pull=(rules:codec=(dgc))"}, PairingError, "try pull=int8"),
        ({"mode": "async:pull=(onebit:vote=true,feedback=false)"}, PairingError, "try pull=int8"),
        ({"mode": "async:pull=(randomk:0.1,scaled=true,feedback=false)"}, PairingError, "try pull=int8"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict, kind: type, message: str) -> None:
    error = start(nn.Linear(2, 2), **settings)
    assert isinstance(error, kind)
    assert message in str(error)


@pytest.mark.parametrize(
    ("gradients", "parameters"),
    [
        ("none", "none"),
        ("bf16", "bf16"),
        ("int4", "int4"),
        ("powersgd:2", "powersgd:2"),
        ("warmup:steps=3,codec=(fp16)", "warmup:steps=3,codec=(fp16)"),
        ("topk:0.01", "int8"),
        ("rules:codec=(topk:0.01)", "int8"),
        ("randomk:0.1", "int8"),
        ("dgc", "int8"),
        ("onebit:vote=true,feedback=false", "int8"),
    ],
)
def test_parameters_go_as_gradients_do_unless_that_says_too_little(gradients: str, parameters: str) -> None:
    assert AsyncSGD().pull_codec(codec_of(gradients)) == codec_of(parameters)
    assert AsyncSGD(pull="topk:0.5").pull_codec(codec_of(gradients)) == codec_of("topk:0.5")


def test_sparse_gradients_are_refused() -> None:
    error = start(Words(), mode="async")
    assert isinstance(error, PairingError)
    assert "use mode=sync" in str(error)


def test_a_server_that_trains_is_told_how_to_serve() -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async:apart=true")
        message = ""
        if fabric.rank == 1:
            try:
                optimizer.step()
            except ConfigError as error:
                message = str(error)
        sync.close()
        return message

    assert "if not sync.serve():" in syncline.run(work, ranks=2, fabric="threads")[1]


def test_unfreezing_later_is_refused() -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = frozen_below()
        optimizer = SGD(model.parameters(), lr=0.1)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async")
        message = ""
        for step in range(2):
            if step:
                model.requires_grad_(True)
            try:
                model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
                optimizer.step()
            except ConfigError as error:
                message = str(error)
        sync.close()
        return message

    for message in syncline.run(work, ranks=2, fabric="threads"):
        assert "unfreeze it before Sync" in message


def test_an_optimizer_that_unscales_by_itself_is_refused() -> None:
    def work(fabric: syncline.Fabric) -> str:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        sync = syncline.Sync(model, optimizer, fabric=fabric, mode="async", scaler=scaler)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        try:
            scaler.step(optimizer)
        except ConfigError as error:
            return str(error)
        finally:
            sync.close()
        return ""

    for message in syncline.run(work, ranks=2, fabric="threads"):
        assert "scaler.unscale_(optimizer)" in message


def test_other_modes_have_no_away() -> None:
    def work(fabric: syncline.Fabric) -> None:
        model = nn.Linear(2, 2)
        sync = syncline.Sync(model, SGD(model.parameters(), lr=0.1), fabric=fabric)
        with sync.away():
            pass

    with pytest.raises(RankFailed) as failed:
        syncline.run(work, ranks=2, fabric="threads")
    assert "away() is for async and bounded" in str(failed.value.failures[0])
