"""Modes with parameter servers: how stale, how exact, what survives, what is refused."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from functools import partial
from math import pi, sin
from pathlib import Path

import pytest
import torch
from catalogue import one_now_others_slow
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from served import (
    LOCKSTEP,
    LOOPS,
    MAKERS,
    MOMENTS,
    RATE,
    START,
    STEPS,
    Descent,
    How,
    Line,
    Strike,
    Turns,
    away_and_back,
    in_single,
    in_turn,
    load,
    lose_a_server,
    plain,
    read_and_hurry,
    resumed,
    save,
    scaled,
    slope_of,
    slopes_drawn,
    survive,
    with_an_exception,
    with_nan,
)
from test_codecs import LENGTHS, SETTINGS, SHAPES, flat_parts, parts_of
from torch import Tensor, nn
from torch.optim import SGD
from training import Words, frozen_below, mlp

import syncline
from syncline.codecs.codec import Part
from syncline.codecs.registry import codec_of
from syncline.errors import ConfigError, CorruptMessage, PairingError, PeerError, PeerLost, RankFailed
from syncline.modes.serving import client as client_module
from syncline.modes.serving import coders as coders_module
from syncline.modes.serving import link as link_module
from syncline.modes.serving.clock import Clock
from syncline.modes.serving.coders import Coder, Mirror
from syncline.modes.serving.link import FabricLink, Kind, Message
from syncline.modes.serving.speech import pack, unpack

CPU = torch.device("cpu")
DEADLINES = syncline.Deadlines(3.0, join=60.0)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# How stale


def threshold(staleness: int) -> float:
    """Of the rate of x' = x - rate * x, computed from an x that is so many updates old."""
    return 2 * sin(pi / (2 * (2 * staleness + 1)))


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
    from served import fill, one_step, values_of
    from training import Batch

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


# Nothing is lost, nothing is applied twice


def gone(expected_slopes: float) -> Tensor:
    return torch.full((9,), START - RATE * expected_slopes)


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


@pytest.mark.parametrize("mode", ["async:share=false", LOCKSTEP])
def test_waiting_for_slow_workers_has_no_deadline_as_long_as_they_are_heard_of(mode: str) -> None:
    """A worker waits in drain() for longer than the deadline, while the other one makes many short steps."""
    found = syncline.run(
        Descent(mode, (1, 60), delays_s=0.25),
        ranks=2,
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


# What codecs say


def both_ends(text: str, parts: tuple[Part, ...]) -> tuple[Coder, Coder]:
    return Coder.begin(codec_of(text), parts, 7), Coder.begin(codec_of(text), parts, 7)


def check_hearing(text: str, parts: tuple[Part, ...], seed: int) -> None:
    """Three steps: what is heard is what was meant, states agree, and sent plus left is what was given."""
    mouth, ear = both_ends(text, parts)
    draws = torch.Generator().manual_seed(seed)
    numel = parts[-1].hi if parts else 0
    for step in range(3):
        given_values = torch.randn(numel, generator=draws)
        values = given_values.clone()
        words, meant, mouth.state = mouth.say(values, step)
        heard = ear.hear(words.clone(), step, CPU)
        assert torch.equal(heard, meant)
        assert mouth.state.keys() == ear.state.keys()
        assert all(torch.equal(mouth.state[key], ear.state[key]) for key in mouth.state if "factor" in key)
        if codec_of(text).feedback and not text.startswith("dgc"):
            torch.testing.assert_close(meant + values, given_values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", SETTINGS)
def test_a_server_hears_what_a_worker_meant_bit_for_bit(text: str) -> None:
    for length in LENGTHS:
        check_hearing(text, flat_parts(length), length)
    check_hearing(text, parts_of(SHAPES), 5)


@hypothesis_settings(max_examples=60)
@given(st.sampled_from(SETTINGS), st.integers(0, 700), st.integers(0, 100))
def test_a_server_hears_what_a_worker_meant_at_any_length(text: str, length: int, seed: int) -> None:
    check_hearing(text, flat_parts(length), seed)


@pytest.mark.parametrize(
    "text",
    [text for text in SETTINGS if not text.startswith(("dgc", "none")) and "vote" not in text and "scaled" not in text],
)
def test_a_mirror_is_what_the_worker_has_and_comes_to_the_parameters(text: str) -> None:
    parts = parts_of(SHAPES)
    numel = parts[-1].hi
    start, goal = torch.zeros(numel), torch.randn(numel, generator=torch.Generator().manual_seed(1))
    mirror, ear, mine = (
        Mirror(Coder.begin(codec_of(text), parts, 3), start),
        Coder.begin(codec_of(text), parts, 3),
        start,
    )
    mine = mine.clone()
    for step in range(40):
        mine += ear.hear(mirror.changes(goal, step), step, CPU)
        assert torch.equal(mine, mirror.flat)
    assert (mine - goal).norm() < (0.9 if text.startswith(("topk:0.01", "powersgd", "rules")) else 0.2) * goal.norm()


@pytest.mark.parametrize("text", SETTINGS)
def test_messages_that_were_cut_or_torn_are_refused(text: str) -> None:
    parts = parts_of(SHAPES)
    mouth, ear = both_ends(text, parts)
    words, _, _ = mouth.say(torch.randn(parts[-1].hi), 1)
    tensors = unpack(words)
    torn = [words[:0], words[:1], words[:-1], words[: len(words) // 2], pack([]), pack(tensors[:-1])]
    torn += [pack([*tensors, torch.zeros(3)]), pack([tensors[0][:-1], *tensors[1:]])]
    for position in range(1 + 2 * len(tensors)):
        for value in (-1, 1 << 40):
            changed = words.clone()
            changed[position] = value
            torn.append(changed)
    before = dict(ear.state)
    for message in torn:
        with pytest.raises(CorruptMessage):
            ear.hear(message, 1, CPU)
    assert all(torch.equal(before[key], ear.state[key]) for key in before)


def test_packing_keeps_every_bit() -> None:
    tensors = [
        torch.arange(n).to(dtype) for n in (0, 1, 7, 8, 9) for dtype in (torch.uint8, torch.float16, torch.float64)
    ]
    for one, other in zip(tensors, unpack(pack(tensors)), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_worker_whose_push_is_corrupt_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    say = coders_module.Coder.say
    bad = coders_module.seed_of(0, 1, "push")

    def torn(self: Coder, values: Tensor, step: int) -> tuple:
        words, meant, state = say(self, values, step)
        return (words[:-1] if self.seed == bad and step == 3 else words), meant, state

    monkeypatch.setattr(coders_module.Coder, "say", torn)
    with pytest.raises(RankFailed) as failed:
        syncline.run(Descent("async:share=false", (6, 6, 6), codec="int8"), ranks=3, fabric="threads")
    assert {rank: error.rank for rank, error in failed.value.failures.items()} == {1: 0}
    place = failed.value.results[0][0]
    torch.testing.assert_close(place, gone(6 * slope_of(0) + 2 * slope_of(1) + 6 * slope_of(2)), rtol=1e-3, atol=1e-3)


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are sent, as between machines."""
    monkeypatch.setattr(client_module, "map_of_another", lambda *_: None)


@pytest.mark.parametrize("pull", ["none", "fp16", "int8", "int4", "topk:0.3", "randomk:0.3", "powersgd:2"])
@pytest.mark.usefixtures("unmapped")
def test_with_every_codec_of_parameters_workers_end_with_those_of_the_servers(pull: str) -> None:
    how = How(f"bounded:ahead=1,servers=2,pull=({pull})", codec="int8")
    found = syncline.run(partial(in_single, how=how, steps=12), ranks=3, fabric="threads")
    assert all(equal(one, found[0]) for one in found)
    exact = syncline.run(partial(in_single, how=How(LOCKSTEP), steps=12), ranks=3, fabric="threads")
    far = [torch.dist(one, other).item() for one, other in zip(found[0], exact[0], strict=True)]
    assert max(far) < 3.0


@pytest.mark.usefixtures("unmapped")
def test_parameters_that_are_sent_as_they_are_make_no_difference() -> None:
    wanted = syncline.run(partial(plain, how=How("sync")), ranks=3, fabric="threads")
    found = syncline.run(partial(plain, how=How(f"{LOCKSTEP},servers=2")), ranks=3, fabric="threads")
    assert all(equal(one, wanted[0]) for one in found)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", ["shm", "torch"])
def test_processes_come_to_what_threads_come_to(fabric: str) -> None:
    how = How(f"{LOCKSTEP},servers=2")
    wanted = syncline.run(partial(plain, how=how), ranks=3, fabric="threads")
    for found in syncline.run(partial(plain, how=how), ranks=3, fabric=fabric):
        assert equal(found, wanted[0])
    coded = How(f"{LOCKSTEP},servers=2,pull=(int8)", codec="topk:0.2")
    one, *others = syncline.run(partial(in_single, how=coded), ranks=3, fabric=fabric)
    assert all(equal(one, other) for other in others)


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


# Faults


@pytest.fixture(scope="module")
def started_before() -> None:
    """What the first run of all leaves open for the next ones."""
    for fabric in ("shm", "torch"):
        syncline.run(rank_of, ranks=1, fabric=fabric)


@pytest.fixture
def nothing_open(started_before: None) -> Iterator[None]:
    """No file of shared memory, no descriptor is left."""
    shared, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/dev/shm")) == shared
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def rank_of(fabric: syncline.Fabric) -> int:
    return fabric.rank


def survivors_of(mode: str, strike: Strike, fabric: str, folder: Path, world: int = 3) -> dict[int, tuple]:
    steps = 6
    work = partial(survive, mode=mode, strike=strike, steps=steps, folder=str(folder))
    with pytest.raises(RankFailed) as failed:
        syncline.run(work, ranks=world, fabric=fabric, deadlines=DEADLINES, keep_going=True)
    assert set(failed.value.failures) == {strike.victim}, failed.value
    rest = [rank for rank in range(world) if rank != strike.victim]
    has_committed = strike.moment == "reading" or (strike.stops and strike.moment == "waiting")
    full = strike.step + has_committed  # steps of the victim that count
    slopes = full * slope_of(strike.victim) + steps * sum(map(slope_of, rest))
    if mode.startswith(LOCKSTEP):
        slopes = full * sum(map(slope_of, range(world))) / world + (steps - full) * sum(map(slope_of, rest)) / len(rest)
    for place, took_s in failed.value.results.values():
        torch.testing.assert_close(place, torch.full((3,), START - RATE * slopes))
        assert took_s < 3 * DEADLINES.operation
    return failed.value.results


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fabric", ["shm", "torch"])
def test_a_worker_that_is_killed_is_not_missed(fabric: str, moment: str, tmp_path: Path) -> None:
    found = survivors_of(LOCKSTEP, Strike(2, moment), fabric, tmp_path)
    assert max(took_s for _, took_s in found.values()) < DEADLINES.operation


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("moment", ["computing", "before commit", "reading"])
@pytest.mark.parametrize("mode", ["async:share=false", "bounded:ahead=1,share=false,servers=2"])
def test_what_a_killed_worker_has_committed_counts_and_nothing_else(mode: str, moment: str, tmp_path: Path) -> None:
    survivors_of(mode, Strike(2, moment), "shm", tmp_path)


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("moment", one_now_others_slow(["reading", "computing", "before commit", "waiting"]))
@pytest.mark.parametrize("fabric", ["shm", "torch"])
def test_a_worker_that_is_stopped_holds_up_the_others_until_the_deadline(
    fabric: str, moment: str, tmp_path: Path
) -> None:
    survivors_of(LOCKSTEP, Strike(2, moment, stops=True), fabric, tmp_path)


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("fabric", ["shm", "torch"])
@pytest.mark.parametrize(("mode", "victim"), [("async:apart=true", 2), ("async", 0), ("bounded:ahead=1,servers=2", 1)])
def test_all_workers_are_told_of_a_server_that_is_lost(fabric: str, mode: str, victim: int) -> None:
    work = partial(lose_a_server, mode=mode, victim=victim)
    with pytest.raises(RankFailed) as failed:
        syncline.run(work, ranks=3, fabric=fabric, deadlines=DEADLINES, keep_going=True)
    assert set(failed.value.failures) == {victim}
    assert len(failed.value.results) == 2
    for outcome in failed.value.results.values():
        assert outcome.culprit == victim, outcome
        assert issubclass(getattr(syncline.errors, outcome.kind), PeerError)
        assert f"server on rank {victim}" in outcome.message
        assert outcome.seconds < DEADLINES.operation


def test_a_server_that_is_lost_during_a_push_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the world: it is rank 0 of the pair."""
    send = link_module.FabricLink.send

    def sent(self: FabricLink, message: Message, deadline_s: float | None = None) -> None:
        if message.kind == Kind.PUSH and message.step == 2:
            raise PeerLost(0, "gone")
        send(self, message, deadline_s)

    monkeypatch.setattr(link_module.FabricLink, "send", sent)
    with pytest.raises(RankFailed) as failed:
        syncline.run(Descent("async:apart=true", (3,)), ranks=2, fabric="threads")
    error = failed.value.failures[0]
    assert isinstance(error, PeerLost)
    assert error.rank == 1
    assert "the server on rank 1" in str(error)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("nothing_open")
def test_fifty_runs_with_a_random_victim_never_hang(tmp_path: Path) -> None:
    draw = random.Random(0)
    modes = ["async:share=false", LOCKSTEP, "bounded:ahead=1,share=false,servers=2"]
    for number in range(50):
        mode, fabric = draw.choice(modes), draw.choice(["shm", "shm", "torch"])
        moments = MOMENTS if mode == LOCKSTEP else [moment for moment in MOMENTS if moment != "waiting"]
        strike = Strike(2, draw.choice(moments), stops=draw.random() < 0.2, step=draw.randrange(5))
        folder = tmp_path / str(number)
        folder.mkdir()
        survivors_of(mode, strike, fabric, folder)


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
        ({"mode": "async", "codec": "dgc"}, PairingError, "try pull=topk"),
        ({"mode": "async:pull=(dgc)"}, PairingError, "try pull=topk"),
        ({"mode": "async:pull=(rules:codec=(dgc))"}, PairingError, "try pull=topk"),
        ({"mode": "async:pull=(onebit:vote=true,feedback=false)"}, PairingError, "try pull=topk"),
        ({"mode": "async:pull=(randomk:0.1,scaled=true,feedback=false)"}, PairingError, "try pull=topk"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict, kind: type, message: str) -> None:
    error = start(nn.Linear(2, 2), **settings)
    assert isinstance(error, kind)
    assert message in str(error)


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
