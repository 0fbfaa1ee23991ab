"""The tasks of a codec have the same bits in its own thread and in the one that waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline
from support.batches import fill, generator_of
from support.references import same_bits
from support.trainees import place_of
from syncline.codecs import kernels
from syncline.path.task_thread import TaskThread

PAUSE_S = 0.05


def sleep_until_closed(thread: TaskThread) -> None:
    """Leave all tasks to whoever waits for them."""
    with thread.lock:
        while not thread.is_closed:
            thread.for_thread.wait()


def only_wait(thread: TaskThread, done: threading.Event) -> None:
    """Leave all tasks to their own thread."""
    while not done.wait(PAUSE_S):
        assert not thread.is_closed


WHO_WORKS: dict[str, tuple[str, Callable[..., None]]] = {
    "user": ("_work", sleep_until_closed),
    "codec": ("help_until", only_wait),
}
EVALUATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plainly": nullcontext,
    "in inference mode": torch.inference_mode,
    "under autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}


def train(fabric: syncline.Fabric, codec: str, mode: str, evaluates: str) -> Tensor:
    """Parameters after some steps. With a lag, what is under way arrives where the model is evaluated."""
    model = fill(nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20)).float(), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, mode=mode, codec=codec, bucket_bytes=2000)
    for step in range(5):
        x = torch.randn(8, 40, generator=generator_of(step, fabric.rank))
        optimizer.zero_grad()
        with EVALUATES[evaluates]() if evaluates == "under autocast" else nullcontext():
            model(x).square().mean().backward()
        optimizer.step()
        model.eval()
        with EVALUATES[evaluates]():
            model(x)
        model.train()
    sync.close()
    return place_of(model)


@pytest.mark.parametrize("evaluates", EVALUATES)
@pytest.mark.parametrize("mode", ["sync", "delayed"])
@pytest.mark.parametrize("codec", ["topk:0.1", "fp16:feedback=true", "randomk:0.1", "powersgd:2"])
def test_whoever_carries_out_the_tasks_of_a_codec_they_have_the_same_bits(
    codec: str, mode: str, evaluates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "native", None)  # torch's own kernels heed an autocast, and not the native ones
    results: list[Tensor] = []
    for method, instead in WHO_WORKS.values():
        with monkeypatch.context() as patch:
            patch.setattr(TaskThread, method, instead)
            results += syncline.run(partial(train, codec=codec, mode=mode, evaluates=evaluates), 2, "threads")
    assert all(same_bits(one, results[0]) for one in results)
