"""The tasks of a codec have the same bits in its own thread and in the one that waits for them."""

from __future__ import annotations

import threading
import time
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
from syncline.codecs.none import void
from syncline.path.task_thread import TaskThread

PAUSE_S = 0.05
PATIENCE_S = 30.0


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


# Threads that are lent

CPU = torch.device("cpu")


def ran_in(thread: TaskThread, order: int, found: list[tuple[int, int]], lends_thread: bool) -> threading.Event:
    """Give it a task that notes the thread that carries it out."""
    ended = threading.Event()

    def task() -> None:
        found.append((order, threading.get_ident()))
        ended.set()

    thread.put((order,), task, lends_thread)
    return ended


def test_a_thread_that_is_lent_carries_out_its_own_task_at_once() -> None:
    thread, found = TaskThread("codec", CPU), []
    for order in range(3):
        assert ran_in(thread, order, found, lends_thread=True).is_set()
    assert found == [(order, threading.get_ident()) for order in range(3)]
    thread.close()


def test_a_thread_that_is_lent_while_a_task_is_under_way_leaves_its_own_to_whoever_goes_on() -> None:
    thread, found, go_on = TaskThread("codec", CPU), [], threading.Event()
    thread.put((0,), lambda: void(go_on.wait(PATIENCE_S)))
    ended = ran_in(thread, 1, found, lends_thread=True)
    assert not found
    go_on.set()
    assert ended.wait(PATIENCE_S)
    assert found[0][1] != threading.get_ident()
    thread.close()


def test_a_thread_that_is_lent_does_not_do_the_work_of_others() -> None:
    """Its own task comes behind one of a lower order, which the codec's thread has yet to take up."""
    thread, found, go_on = TaskThread("codec", CPU), [], threading.Event()
    thread.put((0,), lambda: void(go_on.wait(PATIENCE_S)))
    before = ran_in(thread, 1, found, lends_thread=False)
    after = ran_in(thread, 2, found, lends_thread=True)
    go_on.set()
    assert before.wait(PATIENCE_S)
    assert after.wait(PATIENCE_S)
    assert [order for order, _ in found] == [1, 2]
    assert threading.get_ident() not in {who for _, who in found}
    thread.close()


def test_closing_waits_for_the_task_of_a_thread_that_is_lent() -> None:
    thread, began, go_on = TaskThread("codec", CPU), threading.Event(), threading.Event()
    ended: list[float] = []

    def task() -> None:
        began.set()
        go_on.wait(PATIENCE_S)
        ended.append(time.monotonic())

    lent = threading.Thread(target=thread.put, args=((0,), task, True))
    lent.start()
    assert began.wait(PATIENCE_S)
    threading.Timer(PAUSE_S, go_on.set).start()
    thread.close()
    assert ended
    lent.join()


def test_who_waits_goes_on_when_a_thread_that_is_lent_has_ended_what_is_waited_for() -> None:
    thread, done = TaskThread("codec", CPU), threading.Event()
    threading.Timer(PAUSE_S, lambda: thread.put((0,), done.set, lends_thread=True)).start()
    began = time.monotonic()
    thread.help_until(done)
    assert time.monotonic() - began < PATIENCE_S
    thread.close()
