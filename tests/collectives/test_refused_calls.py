"""Calls that are impossible are refused before anything is sent."""

from __future__ import annotations

import pytest
import torch

import syncline
from support.patience import within
from syncline.errors import ConfigError, UnknownName
from syncline.fabric.threads import Threads

REFUSED = {
    "an unknown op": (lambda f: f.all_reduce(torch.ones(2), op="avg"), "unknown op 'avg'; known: max, mean, sum"),
    "an op nearly known": (lambda f: f.reduce_scatter(torch.ones(2), op="means"), "did you mean mean"),
    "an unknown algorithm": (lambda f: f.all_reduce(torch.ones(2), collective="rinq"), "did you mean ring"),
    "an unknown setting": (lambda f: f.all_reduce(torch.ones(2), collective="tree:arty=3"), "did you mean arity"),
    "an impossible setting": (lambda f: f.all_reduce(torch.ones(2), collective="tree:arity=0"), "less than 1"),
    "a dtype": (lambda f: f.all_reduce(torch.ones(2, dtype=torch.bool)), "torch.bool cannot be sent; use one of"),
    "a complex dtype": (lambda f: f.all_gather(torch.ones(2, dtype=torch.complex64)), "torch.complex64"),
    "a sparse tensor": (lambda f: f.all_reduce(torch.ones(2).to_sparse()), "takes dense tensors on cpu"),
    "another device": (lambda f: f.all_reduce(torch.ones(2, device="meta")), "on meta cannot be sent"),
    "a root outside": (lambda f: f.broadcast(torch.ones(2), root=2), "2 is not a rank of this world"),
    "a root below": (lambda f: f.broadcast(torch.ones(2), root=-1), r"ranks are 0\.\.1"),
    "unequal parts": (lambda f: f.all_to_all(torch.ones(3)), "3 elements do not divide into 2 .*pad to 4"),
    "an unknown inner": (lambda f: f.all_reduce(torch.ones(2), collective="hierarchical:inner=rign"), "mean ring"),
    "sizes of another world": (lambda f: f.all_reduce(torch.ones(2), collective="hierarchical:sizes=1+2"), "1.2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_impossible_is_refused_before_anything_is_sent(name: str) -> None:
    call, message = REFUSED[name]

    def refuse_on_one_rank(fabric: syncline.Fabric) -> float:
        if fabric.rank == 0:
            with pytest.raises(ConfigError, match=message):
                call(fabric)
        return fabric.all_reduce(torch.tensor([1.0])).item()

    deadlines = syncline.Deadlines(within(1.0))
    assert syncline.run(refuse_on_one_rank, ranks=2, fabric="threads", deadlines=deadlines) == [2.0, 2.0]


def test_threads_have_no_engine() -> None:
    def ask_for_it(fabric: syncline.Fabric) -> None:
        with pytest.raises(ConfigError, match='the threads fabric has none: use "auto"'):
            fabric.all_reduce(torch.ones(2), collective="engine")

    syncline.run(ask_for_it, ranks=2, fabric="threads")


def test_host_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[2, 3\] add up to 5, not 4"):
        syncline.run(lambda fabric: None, ranks=4, fabric=Threads(host_sizes=[2, 3]))


def test_an_unknown_op_is_an_unknown_name() -> None:
    with pytest.raises(UnknownName):
        Threads().group(1).fabric(0).all_reduce(torch.ones(1), op="product")
