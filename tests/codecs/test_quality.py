"""Samples of what codecs leave out, and the word about what grows."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import syncline
from support.guarded import filled
from syncline.path import codec_stages
from syncline.tracing.quality import Quality, Watch, grows


def sampled(fabric: syncline.Fabric, codec: str, steps: int = 101) -> list[Quality]:
    model = filled(nn.Linear(40, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 40) * (1 + fabric.rank)).square().sum().backward()
        optimizer.step()
    return sync.quality()


def test_every_fiftieth_step_is_looked_at() -> None:
    for found in syncline.run(lambda fabric: sampled(fabric, "topk:0.1"), ranks=2, fabric="threads"):
        assert [one.step for one in found] == [50, 100]
        assert all(0.1 < one.relative_error < 1.0 for one in found)
        assert all(0.0 < one.cosine < 0.99 for one in found)
    for found in syncline.run(lambda fabric: sampled(fabric, "int8"), ranks=2, fabric="threads"):
        assert all(0 < one.relative_error < 0.05 for one in found)
        assert all(0.99 < one.cosine <= 1.00001 for one in found)
    for found in syncline.run(lambda fabric: sampled(fabric, "fp16"), ranks=2, fabric="threads"):
        assert all(0 < one.relative_error < 0.01 for one in found)
        assert all(one.kept_norm == 0 for one in found)
    assert syncline.run(lambda fabric: sampled(fabric, "none"), ranks=2, fabric="threads") == [[], []]


def test_what_dgc_keeps_is_told() -> None:
    def work(fabric: syncline.Fabric) -> tuple[Quality, float]:
        model = filled(nn.Linear(40, 40))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        sync = syncline.Sync(model, optimizer, fabric=fabric, codec="dgc:0.1,warmup=0")
        for step in range(50):
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(100 * step + fabric.rank)
            model(torch.randn(1, 40, generator=draw)).square().sum().backward()
            optimizer.step()
        kept = sync.state_dict()["codec_state"]["residual"]
        return sync.quality()[-1], float(torch.cat([tensor.flatten() for tensor in kept.values()]).norm())

    for sample, kept in syncline.run(work, ranks=2, fabric="threads"):
        assert sample.step == 50
        assert sample.kept_norm == pytest.approx(kept, rel=1e-5)
        assert 0.1 < sample.relative_error < 1.0
        assert 0.0 < sample.cosine < 0.99


def test_what_dgc_keeps_that_grows_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """One entry in a thousand is sent of gradients that grow without bound."""

    def work(fabric: syncline.Fabric) -> None:
        model = filled(nn.Linear(100, 10, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        syncline.Sync(model, optimizer, fabric=fabric, codec="dgc:0.001,warmup=0")
        for step in range(210):
            optimizer.zero_grad()
            model(torch.full((1, 100), 1.03**step * (1 + fabric.rank))).sum().backward()
            optimizer.step()

    with caplog.at_level(logging.WARNING):
        syncline.run(work, ranks=2, fabric="threads")
    assert [record.getMessage().startswith("what bucket 0 keeps has grown") for record in caplog.records] == [
        True,
        True,
    ]


def test_what_grows_without_bound_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    with caplog.at_level(logging.WARNING):
        for step in range(8):
            watch.add(Quality(50 * step, 0, 0.9, 4.0**step))
            watch.add(Quality(50 * step, 1, 0.9, 5.0 + step % 2))
    assert len(caplog.records) == 1
    assert "bucket 0" in caplog.text


@pytest.mark.parametrize("norms", [[1.0], [1.0, 20.0], [1.0, 30.0, 20.0, 25.0, 24.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
def test_what_settles_is_not_told(norms: list[float]) -> None:
    assert not grows(norms)


@pytest.mark.parametrize(
    ("codec", "positions"),
    [
        ("topk:0.01", "rice"),
        ("topk:1.0", "bitmap"),
        ("dgc:0.01,warmup=0", "rice"),
        ("rules:codec=(topk:0.01),below=100", "rice"),
        ("warmup:codec=(topk:0.01),steps=70", ""),  # step 50 is as it is
        ("int8", ""),
    ],
)
def test_how_positions_were_written_is_told(codec: str, positions: str) -> None:
    for found in syncline.run(lambda fabric: sampled(fabric, codec, steps=51), ranks=2, fabric="threads"):
        assert [one.positions for one in found] == [positions]


def test_positions_are_looked_at_in_samples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(codec_stages, "positions_of", lambda message: looked.append(len(message)) or "rice")
    syncline.run(lambda fabric: sampled(fabric, "topk:0.01", steps=49), ranks=2, fabric="threads")
    assert not looked
    syncline.run(lambda fabric: sampled(fabric, "topk:0.01", steps=51), ranks=2, fabric="threads")
    assert len(looked) == 2  # one bucket on each rank


def cosine_by_hand(fabric: syncline.Fabric) -> tuple[float, float]:
    """What is reported, and what it is: between the gradient after backward and the mean of all gradients."""
    model = filled(nn.Linear(300, 300, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec="topk:0.05")
    for step in range(1, 51):
        draw = torch.Generator().manual_seed(1000 * fabric.rank + step)
        target = torch.randn(300, 300, generator=draw)
        optimizer.zero_grad()
        (model.weight * target).sum().backward()
        mean = fabric.all_reduce(target, op="mean")
    assert model.weight.grad is not None
    exact = torch.cosine_similarity(model.weight.grad.flatten(), mean.flatten(), dim=0)
    return sync.quality()[-1].cosine, float(exact)


def test_the_cosine_is_that_to_the_dense_gradient() -> None:
    for reported, exact in syncline.run(cosine_by_hand, ranks=3, fabric="threads"):
        assert reported == pytest.approx(exact, abs=0.02)
        assert 0.2 < exact < 0.9


def coding_times(fabric: syncline.Fabric, codec: str) -> tuple[float, float]:
    model = filled(nn.Linear(200, 200))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    sync = syncline.Sync(model, optimizer, fabric=fabric, codec=codec)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 200)).square().sum().backward()
        optimizer.step()
    assert ("encoding" in str(sync.report())) == (codec != "none")
    return sync.report().encode_s, sync.report().decode_s


def test_totals_have_the_times_of_codecs() -> None:
    for encode_s, decode_s in syncline.run(lambda f: coding_times(f, "int8"), ranks=2, fabric="threads"):
        assert 0 < encode_s < 1
        assert 0 < decode_s < 1
    assert syncline.run(lambda f: coding_times(f, "none"), ranks=2, fabric="threads") == [(0.0, 0.0)] * 2
