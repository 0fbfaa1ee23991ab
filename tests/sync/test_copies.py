"""Copies of a model belong to no `Sync`: they can be made and used by one rank alone, and change nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import syncline
from support import copies
from support.catalogue import PROCESS_FABRICS, one_now_others_slow
from support.replicas import same
from syncline.errors import ConfigError
from syncline.fabric.threads import Threads

MODES = ["sync", "delayed", "delayed:warmup=3", "local:2", "local:2,warmup=3", "diloco:2", "bounded:ahead=0"]


def assert_copies_change_nothing(mode: str, fabric: str) -> None:
    for found in syncline.run(partial(copies.train_beside_copies, mode=mode), 2, fabric, syncline.Deadlines(20.0)):
        for way, parameters in found.items():
            assert same(parameters, found[""]), way


@pytest.mark.parametrize("mode", MODES)
def test_copies_change_nothing_and_talk_to_nobody(mode: str) -> None:
    assert_copies_change_nothing(mode, "threads")


@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS))
@pytest.mark.parametrize("mode", one_now_others_slow(["delayed", "sync", "bounded:ahead=0"]))
def test_gradients_in_shared_memory_can_be_copied_and_shared(mode: str, fabric: str) -> None:
    assert_copies_change_nothing(mode, fabric)


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_sync_itself_is_not_copied(attempt: Callable) -> None:
    model = nn.Linear(2, 2)
    with Threads().group(1).fabric(0) as alone:
        model.sync = syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=alone)
        with pytest.raises(ConfigError, match=r"neither copied nor pickled.* Keep it outside of the model"):
            attempt(model.sync if attempt is copy.copy else model)
        model.sync.close()
