"""Codecs in Sync: what was sent plus what was kept is the gradient, whatever happens on the way."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.codec_cases import parts_of
from support.guarded import filled
from support.steep import SMALL, Steep, flat_of, slopes_of
from syncline.codecs.registry import codec_of
from syncline.core.state import STATE_VERSION, choose_state
from syncline.errors import ConfigError, RankFailed
from syncline.path.codec_state import BucketCodecState, CodecStateStore

CODECS = ("fp16:feedback=true", "int8", "int4:rounding=stochastic", "onebit", "topk:0.1", "topk:0.1,values=int8")
CODECS += ("topk:0.2,select=sampled", "topk:0.1,block=50", "randomk:0.1", "powersgd:2", "dgc:0.1,momentum=0")
EVERY_CODEC = (*CODECS, "fp16", "bf16", "randomk:0.1,scaled=true,feedback=false", "dgc:0.1,warmup=3")
EVERY_CODEC += ("rules:codec=(dgc:0.1,warmup=3,masking=true),below=100",)
RATES = (0.5, 0.5, 0.05, 0.05, 0.0, 0.2, 0.2, 0.1)


def moved(fabric: syncline.Fabric, codec: str, skipped: int = -1) -> dict[str, list[Tensor]]:
    """How far parameters went and what is still kept, in the units of a step."""
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0])
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, check_every=2, **SMALL)
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        slopes = slopes_of(step, fabric.rank)
        if step == skipped and fabric.rank == 1:
            slopes[0][3, 3] = float("nan")
        model(slopes).backward()
        optimizer.step()
    state = sync.state_dict()["codec_state"]
    kept = [state["residual"][name] * state["step_scale"][name] for name, _ in model.named_parameters()]
    return {"moved": [-p.detach().flatten() for p in model.parameters()], "residual": kept}


@pytest.mark.parametrize("skipped", [-1, 3])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_sent_plus_kept_is_the_gradient_with_changing_rates_and_skipped_steps(
    codec: str, world: int, skipped: int
) -> None:
    by_rank = syncline.run(partial(moved, codec=codec, skipped=skipped), ranks=world, fabric="threads")
    wanted = [torch.zeros(p.numel(), dtype=torch.float64) for p in Steep().parameters()]
    for step, rate in enumerate(RATES):
        if step != skipped:
            for rank in range(world):
                for total, slope in zip(wanted, slopes_of(step, rank), strict=True):
                    total += rate * slope.flatten().double() / world
    for number, exact in enumerate(wanted):
        assert all(torch.equal(by_rank[0]["moved"][number], other["moved"][number]) for other in by_rank)
        kept = torch.stack([found["residual"][number].double() for found in by_rank]).mean(0)
        found = by_rank[0]["moved"][number].double() + kept
        error = (found - exact).norm()
        assert error <= 2e-5 * (1 + exact.norm())


def around_a_large_step(fabric: syncline.Fabric, codec: str, large: float) -> list[dict[str, dict[str, Tensor]]]:
    """What codecs keep before and after a step with a few large entries, and at the end."""
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, **SMALL)
    kept = []
    for step in range(5):
        slopes = slopes_of(step, fabric.rank)
        if step == 2:
            slopes[0][3, 3] = slopes[0][20, 3] = slopes[1][5] = large
        optimizer.zero_grad()
        model(slopes).backward()
        optimizer.step()
        state = copy.deepcopy(sync.state_dict()["codec_state"])
        parameters = copy.deepcopy(dict(model.state_dict()))
        kept.append({"residual": state["residual"], "state": state["state"], "parameters": parameters})
    return [kept[1], kept[2], kept[4]]


def gather_momentum(fabric: syncline.Fabric) -> list[Tensor]:
    """Gradients that have room themselves, in a momentum of a thousand times as much, of which little is sent."""
    model = filled(nn.Linear(50, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-36)
    settings = {"codec": "dgc:0.02,momentum=0.999,warmup=0", "most_skips": 1000}
    sync = syncline.Sync(model, optimizer, fabric=fabric, **settings)
    for _ in range(400):
        optimizer.zero_grad()
        model(torch.full([1, 50], 2e35)).sum().backward()
        optimizer.step()
    state = sync.state_dict()["codec_state"]
    return [*state["state"].values(), *state["residual"].values()]


def test_what_a_codec_gathers_stays_finite() -> None:
    for state in syncline.run(gather_momentum, 2, "threads"):
        assert len(state) == 2
        assert all(tensor.isfinite().all() and tensor.any() for tensor in state)


@pytest.mark.parametrize("large", [3e38, 1e35])
@pytest.mark.parametrize("codec", [*CODECS, "bf16:feedback=true", "dgc:0.1,warmup=0", "rules:codec=(int8),below=100"])
def test_sums_that_overflow_are_skipped_and_leave_what_was_kept_as_it_was(codec: str, large: float) -> None:
    for before, after, end in syncline.run(
        partial(around_a_large_step, codec=codec, large=large), ranks=2, fabric="threads"
    ):
        assert torch.equal(flat_of(before), flat_of(after))
        assert flat_of(end).isfinite().all()
        assert not torch.equal(flat_of(end), flat_of(after))


def test_a_step_that_is_made_again_is_worth_what_it_is_now() -> None:
    """A run that goes back to a checkpoint, and makes the step after it at another learning rate."""

    def work(fabric: syncline.Fabric) -> set[float]:
        model = Steep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = syncline.Sync(model, optimizer, fabric=fabric, codec="topk:0.1")
        saved = copy.deepcopy(sync.state_dict())
        for rate in (0.1, 0.01):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            sync.load_state_dict(saved)
            model(slopes_of(0, fabric.rank)).backward()
            optimizer.step()
        return set(sync.state_dict()["codec_state"]["step_scale"].values())

    assert syncline.run(work, ranks=2, fabric="threads") == [{0.01}, {0.01}]


def trained(
    fabric: syncline.Fabric, model: nn.Module, codec: str, steps: int = 6, interrupted: int = 0
) -> list[Tensor]:
    """Parameters after some steps, with everything saved and built anew in between."""
    net = copy.deepcopy(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.0 if codec.startswith("dgc") else 0.9)
    sync = syncline.Sync(net, optimizer, fabric=fabric, codec=codec, **SMALL)
    for step in range(steps):
        if step == interrupted and step:
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), sync.state_dict()))
            sync.close()
            net = copy.deepcopy(model)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.0 if codec.startswith("dgc") else 0.9)
            sync = syncline.Sync(net, optimizer, fabric=fabric, codec=codec, **SMALL)
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            sync.load_state_dict(saved[2])
        generator = torch.Generator().manual_seed(100 * step + fabric.rank)
        x = torch.randn(8, 10, generator=generator)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4))


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_resuming_gives_the_run_that_was_not_interrupted_bit_for_bit(codec: str) -> None:
    model = small_net()
    whole = syncline.run(partial(trained, model=model, codec=codec), ranks=2, fabric="threads")
    resumed = syncline.run(partial(trained, model=model, codec=codec, interrupted=3), ranks=2, fabric="threads")
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("slope", [1.0, float("nan")])
@pytest.mark.parametrize("codec", ["topk:0.1", "powersgd:2", "dgc:0.1"])
def test_a_run_goes_on_that_was_saved_before_a_step_counted(codec: str, slope: float) -> None:
    """The learning rate was still 0, or the gradient was not finite."""

    def work(fabric: syncline.Fabric) -> list[Tensor]:
        model, state = Steep(), None
        for rate in (0.0, 0.1):
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec)
            if state is not None:
                sync.load_state_dict(state)
            optimizer.zero_grad()
            model([slope * some if rate == 0.0 else some for some in slopes_of(0, fabric.rank)]).backward()
            optimizer.step()
            state = copy.deepcopy(sync.state_dict())
            sync.close()
        return [p.detach() for p in model.parameters()]

    for parameters in syncline.run(work, ranks=2, fabric="threads"):
        assert torch.cat([p.flatten() for p in parameters]).any()


@pytest.mark.parametrize("codec", ["topk:0.5", "powersgd:1,min_compression_rate=1", "dgc:0.5"])
def test_what_was_loaded_is_held_once_and_the_state_that_was_given_stays_whole(codec: str) -> None:
    parts = parts_of(((8, 6), (5,)))
    tensors = BucketCodecState.begin(codec_of(codec), parts, torch.device("cpu"), feedback=True).state
    kept = {part.name: torch.ones(part.hi - part.lo) for part in parts}
    saved = {
        "residual": kept,
        "step_scale": dict.fromkeys(kept, 0.1),
        "state": {key: tensors[key] + 1 for key in tensors},
    }
    whole = copy.deepcopy(saved)
    memory = CodecStateStore(codec_of(codec))
    for _ in range(2):
        memory.load_state_dict(saved)
        memory.of(0, lambda: parts, torch.device("cpu"))
        used = ("residual", "step_scale", "state") if memory.codec.feedback else ("state",)
        assert not any(memory.saved[kind] for kind in used)
        torch.testing.assert_close(memory.state_dict(), whole, rtol=0, atol=0)
        torch.testing.assert_close(saved, whole, rtol=0, atol=0)


def all_codecs(fabric: syncline.Fabric, model: nn.Module) -> list[list[Tensor]]:
    return [trained(fabric, model, codec) for codec in EVERY_CODEC]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", ["shm", "torch"])
def test_every_codec_keeps_the_ranks_of_every_fabric_equal(fabric: str) -> None:
    model = small_net()
    by_rank = syncline.run(partial(all_codecs, model=model), ranks=2, fabric=fabric)
    threads = syncline.run(partial(all_codecs, model=model), ranks=2, fabric="threads")
    for number, codec in enumerate(EVERY_CODEC):
        for one, other in zip(by_rank[0][number], by_rank[1][number], strict=True):
            assert torch.equal(one, other), codec
        for one, other in zip(by_rank[0][number], threads[0][number], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=codec)


def state_of(rank: int, world: int, kept: float, codec: str = "topk") -> dict:
    codec_state = {
        "residual": {"p": torch.full((3,), kept)},
        "step_scale": {"p": 0.1},
        "state": {"p/factor": torch.ones(2)},
    }
    who = {"version": STATE_VERSION, "rank": rank, "world": world}
    return who | {"codec": codec, "layout": {}, "codec_state": codec_state}


def test_with_another_number_of_ranks_the_mean_of_what_was_kept_stays() -> None:
    saved = [state_of(rank, 3, float(rank)) for rank in range(3)]
    chosen = [choose_state(saved, rank, 2, {"codec": "topk"}) for rank in range(2)]
    for state in chosen:
        assert torch.equal(state["codec_state"]["residual"]["p"], torch.ones(3))
        assert torch.equal(state["codec_state"]["state"]["p/factor"], torch.ones(2))
    assert choose_state(saved, 1, 3, {"codec": "topk"}) is saved[1]


def save_and_load(fabric: syncline.Fabric, states: list[dict], codec: str, mode: str) -> dict:
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, mode=mode)
    if states:
        sync.load_state_dict(states)
    for step in range(3):
        optimizer.zero_grad()
        model(slopes_of(step, fabric.rank)).backward()
        optimizer.step()
    saved = sync.state_dict()
    sync.close()
    return saved


@pytest.mark.parametrize("mode", ["sync", "local:2", "delayed"])
@pytest.mark.parametrize("codec", ["none", "topk:0.1"])
def test_two_ranks_go_on_from_the_state_of_one_and_one_from_those_of_two(codec: str, mode: str) -> None:
    states: list[dict] = []
    for world in (1, 2, 1, 3):
        work = partial(save_and_load, states=states, codec=codec, mode=mode)
        states = syncline.run(work, ranks=world, fabric="threads")
        assert [(state["rank"], state["world"]) for state in states] == [(rank, world) for rank in range(world)]


def trained_to(fabric: syncline.Fabric, steps: range, codec: str, saved: list[dict], skipped: int = -1) -> dict:
    """A state of everything after these steps, of a run that begins or goes on."""
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0])
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec, **SMALL)
    if saved:
        model.load_state_dict(saved[0]["model"])
        sync.load_state_dict([one["sync"] for one in saved])
    for step in steps:
        optimizer.param_groups[0]["lr"] = RATES[step]
        optimizer.zero_grad()
        slopes = slopes_of(step, fabric.rank)
        if step == skipped:
            slopes[0][3, 3] = float("nan")
        model(slopes).backward()
        optimizer.step()
    found = copy.deepcopy({"model": model.state_dict(), "sync": sync.state_dict()})
    sync.close()
    return found


@pytest.mark.parametrize("skipped", [-1, 2])
@pytest.mark.parametrize("codec", CODECS)
def test_what_several_ranks_have_kept_is_in_the_first_step_of_one(codec: str, skipped: int) -> None:
    """Its learning rate is another one, and it may be skipped."""
    before = syncline.run(partial(trained_to, steps=range(2), codec=codec, saved=[]), 3, "threads")
    reloaded = syncline.run(partial(trained_to, steps=range(0), codec=codec, saved=before), 1, "threads")
    work = partial(trained_to, steps=range(2, 4), codec=codec, saved=reloaded, skipped=skipped)
    (after,) = syncline.run(work, 1, "threads")
    for number, (name, shape) in enumerate((name, p.shape) for name, p in Steep().named_parameters()):
        exact = torch.zeros(shape, dtype=torch.float64)
        for step, rate in enumerate(RATES[:4]):
            ranks = range(3) if step < 2 else range(step != skipped)
            exact -= sum((rate / len(ranks) * slopes_of(step, rank)[number].double() for rank in ranks), 0.0)
        found = after["model"][name].double()
        assert (found - exact).norm() <= 2e-5 * (1 + exact.norm())
        assert (before[0]["model"][name] - after["model"][name]).norm() > 0.01


def test_one_rank_needs_the_states_of_all_that_have_kept_something() -> None:
    states = syncline.run(partial(trained_to, steps=range(2), codec="topk:0.1", saved=[]), 2, "threads")
    with pytest.raises(RankFailed, match="those of all 2 ranks"):
        syncline.run(partial(trained_to, steps=range(0), codec="topk:0.1", saved=states[:1]), 1, "threads")


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([state_of(0, 3, 0.0)], "those of all 3"),
        ([state_of(1, 2, 0.0, codec="int8")], "codec=int8"),
        ([state_of(1, 2, 0.0) | {"version": 7}], "version 7"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(states: list[dict], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_state(states, 1, 2, {"codec": "topk"})


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_the_report_counts_what_was_said(codec: str) -> None:
    def said(fabric: syncline.Fabric) -> tuple[int, int]:
        model = filled(nn.Linear(100, 100))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()
        totals = sync.report()
        return totals.nbytes, totals.sent_bytes

    for nbytes, sent in syncline.run(said, ranks=2, fabric="threads"):
        assert nbytes == 4 * 10_100
        assert 0 < sent < 0.8 * nbytes
    assert codec_of(codec)
