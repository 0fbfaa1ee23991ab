"""Codecs between a worker and a server: what is heard is what was meant, and what is torn is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

import syncline
from support.codec_cases import LENGTHS, SETTINGS, SHAPES, flat_parts, parts_of
from support.on_a_line import Descent, gone, slope_of
from support.served import LOCKSTEP, How, equal, in_single, plain
from syncline.codecs.registry import codec_of
from syncline.core.parts import Part
from syncline.errors import CorruptMessage, RankFailed
from syncline.modes.serving import client as client_module
from syncline.modes.serving import coders as coders_module
from syncline.modes.serving.coders import Coder, Mirror
from syncline.modes.serving.speech import pack, unpack

CPU = torch.device("cpu")
DEADLINES = syncline.Deadlines(3.0, join=60.0)


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
        if codec_of(text).feedback:
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

    def torn(self: Coder, values: Tensor, step: int, *own: object) -> tuple:
        words, meant, state = say(self, values, step, *own)
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
