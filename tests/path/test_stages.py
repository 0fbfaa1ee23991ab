"""The stages of a bucket are data: what a run leaves stamps of is what the list says, and so is what is sent."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.codec_cases import SHAPES, parts_of
from support.guarded import filled
from syncline.codecs.codec import Codec, ReduceContext
from syncline.codecs.conversation import Conversation, Declaration, Mean
from syncline.codecs.none import NoCodec
from syncline.codecs.registry import CODECS, codec_of
from syncline.collectives.schedule import hosts_of_sizes
from syncline.core.parts import Part
from syncline.core.parts import parts_of as parts_in
from syncline.errors import ConfigError, FabricError
from syncline.fabric.channel import Channel
from syncline.fabric.threads import Threads
from syncline.path import stages
from syncline.path.coded import CodedPath
from syncline.path.stages import Route, Stage, stages_of
from syncline.path.work import PassWork

EVERY_CODEC = (
    "none",
    "fp16",
    "fp16:feedback=true",
    "bf16",
    "int8",
    "int4",
    "onebit",
    "onebit:vote=true,feedback=false",
    "topk:0.1",
    "topk:0.1,select=sampled",
    "randomk:0.1",
    "powersgd:2",
    "dgc:0.1,warmup=0",
    "warmup:codec=(int8),steps=2",
    "rules:codec=(topk:0.1),below=100",
    "rules:codec=(warmup:codec=(int8),steps=2),below=100",
)
STEPS = 4


def model_of(dtype: torch.dtype) -> nn.Module:
    return filled(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20), nn.Linear(20, 9)).to(dtype), seed=0)


def train(
    fabric: syncline.Fabric, codec: str | Codec, collective: str = "auto", lean: bool = False, dtype=torch.float32
) -> list[PassWork]:
    """Some steps; the works of their passes, all of them good."""
    model = model_of(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(
        model, optimizer, fabric=fabric, codec=codec, collective=collective, lean=lean, bucket_bytes=2000
    )
    works: list[PassWork] = []
    path = sync.reducer.path
    end = path.end
    path.end = lambda current, own: (works.append(current), end(current, own))
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(10 * step + fabric.rank)
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=draws).to(dtype)).square().mean().backward()
        optimizer.step()
    assert all(work.status.is_good for work in works)
    sync.close()
    return works


def route_of(fabric: syncline.Fabric, collective: str) -> Route:
    hosts = fabric.hosts if collective == "hierarchical" else ()
    return Route(fabric.world, fabric.rank, hosts, collective)


def differences(fabric: syncline.Fabric, collective: str, lean: bool, dtype: torch.dtype) -> list[str]:
    """Codecs that left other stamps than the list has that is made without a fabric."""
    found = []
    for codec in EVERY_CODEC:
        for step, work in enumerate(train(fabric, codec, collective, lean, dtype), 1):
            for one in work.works:
                parts = parts_in(one.bucket.slots)
                listed = stages_of(codec_of(codec), parts, dtype, step, route_of(fabric, collective), lean)
                stamps = [stamp.stage for stamp in one.stamps]
                if stamps != [stage.name for stage in listed]:
                    found.append(f"{codec} in step {step}: {stamps} is not {[stage.name for stage in listed]}")
                if any(stamp.ended_ns < stamp.began_ns for stamp in one.stamps):
                    found.append(f"{codec} in step {step}: a stage ends before it begins")
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(
    ("fabric", "ranks", "collective"),
    [
        ("threads", 3, "auto"),
        ("shm", 2, "auto"),
        (Threads(host_sizes=[2, 1]), 3, "hierarchical"),
    ],
    ids=["threads", "shm", "hosts"],
)
def test_a_run_leaves_a_stamp_of_every_stage_of_the_list(
    fabric: str | Threads, ranks: int, collective: str, lean: bool, dtype: torch.dtype
) -> None:
    work = partial(differences, collective=collective, lean=lean, dtype=dtype)
    for found in syncline.run(work, ranks, fabric):
        assert not found, "\n".join(found)


def test_every_codec_is_tried() -> None:
    assert {codec_of(text).name for text in EVERY_CODEC} == set(CODECS)


# What is sent


def sent_and_listed(fabric: syncline.Fabric) -> list[tuple[str, list[int], list[int]]]:
    """Of every codec, the bytes of what a rank has handed to collectives, and of the wires of its lists."""
    found = []
    usual = Channel.all_reduce, Channel.all_gather, Channel.exchange
    handed: list[int] = []

    def noting(start, position: int):
        def noted(self: Channel, *given: object):
            own = given[position]
            if isinstance(own, Tensor) and own.dtype != torch.int32:  # which the status has
                handed.append(own.nbytes)
            return start(self, *given)

        return noted

    for codec in EVERY_CODEC:
        handed.clear()
        Channel.all_reduce, Channel.all_gather, Channel.exchange = map(noting, usual, (0, 1, 1))
        try:
            works = train(fabric, codec)
        finally:
            Channel.all_reduce, Channel.all_gather, Channel.exchange = usual
        listed = [
            stage.nbytes
            for step, work in enumerate(works, 1)
            for one in work.works
            for stage in stages_of(
                codec_of(codec), parts_in(one.bucket.slots), torch.float32, step, route_of(fabric, "auto")
            )
            if stage.name == "wire"
        ]
        found.append((codec, sorted(handed), sorted(listed)))
    return found


@pytest.mark.timeout(120)
def test_collectives_are_as_long_as_the_list_says() -> None:
    for found in syncline.run(sent_and_listed, 2, "shm"):
        for codec, handed, listed in found:
            assert handed == listed, codec


class Wrong(Codec):
    """Asks what it has not declared."""

    name = "wrong"
    feedback = False

    def __init__(self, how: str) -> None:
        self.how = how

    @property
    def most_questions(self) -> int:
        return 2

    def questions(self, parts: tuple[Part, ...], world: int, step: int) -> tuple[Declaration, ...]:
        (one,) = NoCodec().questions(parts, world, step)
        return {"longer": (one,), "more": (one,), "fewer": (one, one)}[self.how]

    def reduce(self, values: Tensor, state: dict[str, Tensor], context: ReduceContext) -> Conversation:
        mean = yield Mean(torch.cat([values, values[:1]]) if self.how == "longer" else values.clone())
        if self.how == "more":
            yield Mean(values.clone())
        return lambda out: out.copy_(mean)


def try_wrong(fabric: syncline.Fabric, how: str) -> tuple[str, int]:
    """What a rank is told, and how many collectives of data had begun by then."""
    model = model_of(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = syncline.Sync(model, optimizer, fabric=fabric, codec="int8").reducer.path
    assert isinstance(path, CodedPath)
    path.stages.codec = Wrong(how)
    try:
        model(torch.ones(1, 20)).sum().backward()
    except (ConfigError, FabricError) as error:
        return str(error), sum(channel.started.total() for channel in path.answerer.channels)
    return "nothing", 0


@pytest.mark.parametrize(
    ("how", "words", "begun"),
    [
        ("longer", "where it has declared", 0),
        ("more", "has declared 1 questions, and asks more", 1),
        ("fewer", "has declared 2 questions, and asks fewer", 1),
    ],
)
def test_a_codec_that_asks_what_it_has_not_declared_is_refused(how: str, words: str, begun: int) -> None:
    for told, started in syncline.run(partial(try_wrong, how=how), 2, "threads"):
        assert words in told or "gave up a bucket" in told
        assert started <= begun


# Lists without a fabric


def names(codec: str, lean: bool = False, **route: object) -> str:
    listed = stages_of(codec_of(codec), parts_of(SHAPES), torch.float32, 5, Route(**({"world": 4} | route)), lean)
    assert sum(stage.settles for stage in listed) == 1
    return " ".join(stage.name for stage in listed)


def test_lists_are_those_of_the_picture() -> None:
    assert names("none") == "fill ready wire status"
    assert names("topk:0.1") == "fill ready encode wire decode status commit"
    assert names("int8") == "fill ready encode wire combine wire decode status commit"
    assert names("int8", lean=True) == "fill ready encode wire combine wire combine status commit decode"
    assert names("fp16", lean=True) == "fill ready encode wire decode status commit"
    assert names("topk:0.1", world=1) == "fill ready encode decode status commit"
    hosts = hosts_of_sizes([2, 2])
    assert names("topk:0.1", hosts=hosts) == ("fill ready encode sum encode wire decode spread decode status commit")
    assert names("topk:0.1", hosts=hosts, rank=1) == "fill ready encode sum spread decode status commit"


def test_a_wire_says_what_answers_it() -> None:
    def wires(codec: str, collective: str) -> list[Stage]:
        route = Route(4, 0, (), collective)
        return [one for one in stages_of(codec_of(codec), parts_of(SHAPES), torch.float32, 5, route) if one.question]

    assert [stage.collective for stage in wires("none", "engine")] == ["engine"]
    assert [stage.collective for stage in wires("fp16", "engine")] == ["direct"]
    assert [stage.collective for stage in wires("randomk:0.1", "ring")] == ["ring"]
    exchange, gather = wires("int8", "ring")
    assert (exchange.number, gather.number) == (0, 1)
    assert exchange.nbytes == 4 * gather.nbytes
    assert 0 <= gather.nbytes - gather.question.largest < stages.WORD_BYTES


def test_lists_are_made_without_a_fabric() -> None:
    tree = ast.parse(Path(stages.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[1] for name in imported if name.startswith("syncline")} <= {"core", "codecs", "collectives"}
