"""Modes: what they are called, when ranks must have the same bits, and what becomes of those that die."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import syncline
from support.catalogue import PROCESS_FABRICS, one_now_others_slow
from support.patience import within
from support.references import same_bits
from support.trainees import (
    DEADLINES,
    PLAIN,
    Case,
    Ending,
    Trainee,
    assert_paths,
    train_cases,
    train_until_one_is_killed,
)
from syncline import Deadlines
from syncline.errors import ConfigError, RankFailed
from syncline.modes.delayed import Delayed
from syncline.modes.diloco import DiLoCo
from syncline.modes.fragments import split
from syncline.modes.local import LocalSGD
from syncline.modes.mode import Mode
from syncline.modes.registry import MODES, mode_of, text_of_mode
from syncline.modes.slowmo import SlowMo
from syncline.modes.synchronous import Synchronous

# Names

SPELLED: dict[str, Mode] = {
    "sync": Synchronous(),
    "delayed": Delayed(),
    "delayed:warmup=7": Delayed(warmup=7),
    "local": LocalSGD(),
    "local:12": LocalSGD(every=12),
    "local:every=8": LocalSGD(every=8),
    "local:every=4,warmup=3,growth=1.5,longest=64,within_hosts=true,optimizer=average": LocalSGD(
        every=4, warmup=3, growth=1.5, longest=64, within_hosts=True, optimizer="average"
    ),
    "slowmo:every=4,momentum=0.7,lr=0.9,warmup=2,optimizer=reset": SlowMo(
        every=4, momentum=0.7, lr=0.9, warmup=2, optimizer="reset"
    ),
    "diloco:every=12,lr=0.5,momentum=0.8,warmup=1,fragments=3,delay=2,merge=0.5": DiLoCo(
        every=12, lr=0.5, momentum=0.8, warmup=1, fragments=3, delay=2, merge=0.5
    ),
}


@pytest.mark.parametrize("text", SPELLED)
def test_a_mode_is_what_its_text_says(text: str) -> None:
    assert mode_of(text) == SPELLED[text]
    assert mode_of(SPELLED[text]) is SPELLED[text]
    assert mode_of(text_of_mode(SPELLED[text])) == SPELLED[text]


@pytest.mark.parametrize("name", MODES)
def test_every_mode_is_written_as_short_as_can_be(name: str) -> None:
    assert text_of_mode(mode_of(name)) == name


# What every mode in the table does


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODES)
def test_ranks_of_every_mode_are_equal_after_draining_and_have_moved(name: str, world: int) -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, Tensor]:
        trainee = Trainee(fabric, name, PLAIN)
        began = trainee.place()
        trainee.train(5)
        drained = trainee.drained()
        trainee.sync.close()
        return began, drained

    ranks = syncline.run(work, world, "threads", DEADLINES)
    assert all(same_bits(drained, ranks[0][1]) for _, drained in ranks)
    assert all(drained.isfinite().all() and not torch.equal(drained, began) for began, drained in ranks)


@pytest.mark.parametrize("name", MODES)
def test_a_run_of_every_mode_goes_on_from_what_it_has_saved(name: str) -> None:
    def work(fabric: syncline.Fabric) -> tuple[Tensor, Tensor]:
        trainee = Trainee(fabric, name, PLAIN)
        trainee.train(3)
        trainee.sync.drain()
        saved, place = trainee.sync.state_dict(), trainee.place()
        trainee.sync.close()
        other = Trainee(fabric, name, PLAIN)
        other.model.load_state_dict(trainee.model.state_dict())
        other.sync.load_state_dict(saved)
        found = other.drained()
        other.sync.close()
        return place, found

    for place, found in syncline.run(work, 2, "threads", DEADLINES):
        assert same_bits(found, place)


@pytest.mark.parametrize(
    ("text", "value", "rule_or_remedy"),
    [
        ("delayed:warmup=-1", "warmup=-1", "try delayed:warmup="),
        ("local:every=0", "every=0", "try local:every="),
        ("local:warmup=-2", "warmup=-2", "try local:warmup="),
        ("local:growth=0.5", "growth=0.5", "try local:growth="),
        ("local:every=8,longest=4", "longest=4", "every=8.*try longest=8"),
        ("local:optimizer=keeep", "keeep", "did you mean keep"),
        ("local:every=soon", "every='soon'", "is not a int"),
        ("local:evry=8", "evry", "did you mean every"),
        ("slowmo:every=0", "every=0", "try slowmo:every="),
        ("slowmo:momentum=1", "momentum=1", "below 1; try"),
        ("slowmo:momentum=-0.1", "momentum=-0.1", "below 1; try"),
        ("slowmo:lr=0", "lr=0", "positive"),
        ("slowmo:optimizer=drop", "drop", "known: average, keep, reset"),
        ("diloco:every=0", "every=0", "try diloco:every="),
        ("diloco:fragments=0", "fragments=0", "try fragments=1"),
        ("diloco:every=10,fragments=4", "every=10", "fragments=4; try every=12"),
        ("diloco:every=8,fragments=2,delay=4", "delay=4", "below 4 steps.*try delay=3"),
        ("diloco:delay=-1", "delay=-1", "from 0"),
        ("diloco:merge=1.5", "merge=1.5", "from 0 to 1; try"),
        ("diloco:lr=-1", "lr=-1", "positive; try"),
        ("diloco:momentum=1", "momentum=1", "below 1; try"),
        ("diloco:warmup=-3", "warmup=-3", "try diloco:warmup="),
        ("lokal", "lokal", "did you mean local"),
        ("gossiip", "gossiip", "unknown mode"),
    ],
)
def test_a_bad_setting_is_refused_with_value_rule_and_remedy(text: str, value: str, rule_or_remedy: str) -> None:
    with pytest.raises(ConfigError, match=rule_or_remedy) as caught:
        mode_of(text)
    assert value in str(caught.value)


def test_more_fragments_than_parameters_are_refused() -> None:
    def work(fabric: syncline.Fabric) -> None:
        Trainee(fabric, "diloco:every=7,fragments=7")

    with pytest.raises(RankFailed, match=r"fragments=7 are more than the 6 parameters; try .*6"):
        syncline.run(work, 2, "threads")


# Ranks are equal when they must be

MODES_TO_COMPARE = {
    "delayed": 1,
    "delayed:warmup=2": 1,
    "local:every=3": 3,
    "local:every=2,warmup=2": 2,
    "slowmo:every=3": 3,
    "diloco:every=3": 3,
    "diloco:every=4,delay=2": 4,
    "diloco:every=4,fragments=2,delay=1,merge=0.5": 0,
}
CASES = [Case(mode, codec, alike) for mode, alike in MODES_TO_COMPARE.items() for codec in ("none", "int8", "topk:0.3")]
STEPS = 9


@cache
def trained(fabric: str, world: int) -> list[list[list[Tensor]]]:
    """All cases in one life of each rank."""
    return syncline.run(partial(train_cases, cases=CASES, steps=STEPS), world, fabric, DEADLINES)


def assert_alike_when_due(ranks: list[list[Tensor]], alike_every: int) -> None:
    for step in range(1, STEPS + 2):
        due = step > STEPS or (alike_every and step % alike_every == 0)
        for other in ranks[1:]:
            if due:
                assert same_bits(ranks[0][step - 1], other[step - 1]), step
            elif alike_every != 1 and step > 2:  # warm-ups are over
                assert not same_bits(ranks[0][step - 1], other[step - 1]), step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mode} {case.codec}")
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_ranks_have_the_same_bits_when_they_have_met(case: Case, world: int) -> None:
    assert_alike_when_due([rank[CASES.index(case)] for rank in trained("threads", world)], case.alike_every)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mode} {case.codec}")
@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS[::-1]))
def test_ranks_that_are_processes_do_the_same(case: Case, fabric: str) -> None:
    world = 2
    number = CASES.index(case)
    ranks = [rank[number] for rank in trained(fabric, world)]
    assert_alike_when_due(ranks, case.alike_every)
    for one, other in zip(ranks, trained("threads", world), strict=True):
        assert_paths(one, other[number], 1e-6)


# Fragments

SIZES = st.lists(st.integers(0, 3), min_size=1, max_size=4)


class Shaped(nn.Module):
    """Blocks with so many layers each, a head, and perhaps numbers of its own."""

    def __init__(self, blocks: list[int], has_own: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(*[nn.Linear(1, 1) for _ in range(size)]) for size in blocks])
        self.head = nn.Linear(1, 2)
        if has_own:
            self.gain = nn.Parameter(torch.ones(1))


@given(SIZES, st.booleans(), st.integers(1, 6))
def test_every_parameter_is_in_exactly_one_fragment(blocks: list[int], has_own: bool, fragments: int) -> None:
    named = list(Shaped(blocks, has_own).named_parameters())
    if fragments > len(named):
        with pytest.raises(ConfigError, match=f"fragments={fragments}"):
            split(named, fragments)
        return
    parts = split(named, fragments)
    assert len(parts) == fragments
    assert all(parts)
    assert sorted(name for part in parts for name, _ in part) == sorted(name for name, _ in named)


# Ranks that die


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS[::-1]))
@pytest.mark.parametrize(
    ("mode", "codec", "place"),
    [
        ("local:every=4", "none", "before forward"),
        ("delayed", "none", "after backward"),
        pytest.param("delayed", "int8", "before forward", marks=pytest.mark.slow),
        pytest.param("diloco:every=6,fragments=2,delay=2", "none", "before forward", marks=pytest.mark.slow),
        pytest.param("diloco:every=6,fragments=2,delay=2", "topk", "before forward", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_is_named_by_every_survivor(
    fabric: str, mode: str, codec: str, place: str, tmp_path: Path
) -> None:
    """In the middle of a period, or while gradients or a fragment are under way."""
    victim = 1
    work = partial(
        train_until_one_is_killed, mode=mode, codec=codec, victim=victim, at=5, place=place, folder=str(tmp_path)
    )
    with pytest.raises(RankFailed) as caught:
        syncline.run(work, 3, fabric, Deadlines(20.0, join=60.0))
    assert list(caught.value.failures) == [victim]
    endings: dict[int, Ending] = caught.value.results
    assert sorted(endings) == [0, 2]
    for ending in endings.values():
        assert (ending.kind, ending.culprit) == ("PeerLost", victim), ending
        assert f"rank {victim} " in ending.message
        assert ending.seconds < within(10.0)
