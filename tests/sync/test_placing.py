"""Gradients on their way into a bucket: copied, and divided where an engine only adds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import syncline
from support.guarded import filled
from syncline.path.placing import SMALL_BYTES, put, put_plainly

LAYOUTS = {
    "contiguous": lambda values: values,
    "transposed": lambda values: values.t().contiguous().t(),
    "with gaps": lambda values: values.repeat_interleave(2, 1)[:, ::2],
    "sparse": lambda values: values.to_sparse(),
    "negative in memory": lambda values: torch._neg_view(-values),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", [1, 3])
def test_what_is_put_is_the_gradient_divided(layout: str, dtype: torch.dtype, divisor: int) -> None:
    values = [torch.randn(shape, dtype=dtype) for shape in [(201, 203), (1, 3), (37, 41), (300, 7)]]
    gradients = [LAYOUTS[layout](one) for one in values]
    natively, plainly = ([torch.zeros(one.shape, dtype=dtype) for one in values] for _ in range(2))
    finite = put(gradients, natively, divisor)
    put_plainly(gradients, plainly, divisor)
    assert finite is (True if layout == "contiguous" and divisor != 1 else None)
    for value, native, plain in zip(values, natively, plainly, strict=True):
        assert torch.equal(native, value / divisor)
        assert torch.equal(plain, value / divisor)


@pytest.mark.parametrize("divisor", [1, 2])
def test_a_gradient_of_another_shape_is_refused_and_nothing_is_written(divisor: int) -> None:
    memory = torch.zeros(800, 100)
    with pytest.raises(RuntimeError):
        put([torch.ones(400, 100)], [memory[:200]], divisor)
    assert not memory.any()


def test_a_gradient_without_memory_counts_as_zeros() -> None:
    view = torch.ones(200, 100)
    put([torch._efficientzerotensor((200, 100))], [view], 1)
    assert not view.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 1, 5, 15, 16, 33])
@pytest.mark.parametrize("more", [0, 1, 15, 40])
def test_nothing_beside_a_large_gradient_is_written(dtype: torch.dtype, start: int, more: int) -> None:
    numel = SMALL_BYTES + more
    memory, gradient = torch.full((numel + 100,), 7, dtype=dtype), torch.randn(numel + 1).to(dtype)[1:]
    put([gradient], [memory[start : start + numel]], 1)
    assert torch.equal(memory[start : start + numel], gradient)
    assert (memory[:start] == 7).all()
    assert (memory[start + numel :] == 7).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 5000])
def test_what_is_not_finite_is_seen_on_the_way(bad: float, at: int) -> None:
    gradients = [torch.randn(10), torch.randn(5001)]
    gradients[1][at] = bad
    assert put(gradients, [torch.zeros(10), torch.zeros(5001)], 2) is False


def gradients_of(fabric: syncline.Fabric, backwards: int, set_to_none: bool) -> tuple[Tensor, float]:
    """The gradient at the third step, and what it should be: each pass adds rank + 1 to a mean of what was there."""
    model = filled(nn.Linear(70, 300, bias=False))  # larger than what is placed together with others
    small = filled(nn.Linear(2, 3, bias=False))
    both = nn.ModuleList([model, small])
    optimizer = SGD(both.parameters(), lr=0.0)
    syncline.Sync(both, optimizer, fabric=fabric, check_every=1)
    expected = 0.0
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        expected = 0.0
        for _ in range(backwards):
            ((model.weight.sum() + small.weight.sum()) * (fabric.rank + 1)).backward()
            expected += (fabric.world + 1) / 2
        optimizer.step()
    found = torch.cat([parameter.grad.view(-1) for parameter in both.parameters()])
    return found, expected


@pytest.mark.parametrize("backwards", [1, 2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_every_pass_divides_once_what_is_new_and_what_was_there(backwards: int, set_to_none: bool) -> None:
    work = partial(gradients_of, backwards=backwards, set_to_none=set_to_none)
    for found, expected in syncline.run(work, ranks=3, fabric="torch"):
        torch.testing.assert_close(found, torch.full_like(found, expected))


def with_nan(fabric: syncline.Fabric, shape: tuple[int, int]) -> tuple[list[bool], bool]:
    """Whether weights are finite after each step, and stayed as they were in the one where a gradient was NaN."""
    model = filled(nn.Linear(*shape, bias=False))
    optimizer = SGD(model.parameters(), lr=0.1)
    syncline.Sync(model, optimizer, fabric=fabric)
    seen, weights = [], []
    for step in range(4):
        optimizer.zero_grad()
        factor = float("nan") if step == 2 and fabric.rank == 1 else 1.0
        (model.weight.sum() * factor).backward()
        optimizer.step()
        weights.append(model.weight.detach().clone())
        seen.append(bool(weights[-1].isfinite().all()))
    return seen, torch.equal(weights[1], weights[2]) and not torch.equal(weights[2], weights[3])


@pytest.mark.parametrize("shape", [(2, 3), (70, 300)])
def test_a_bad_gradient_of_one_rank_is_known_to_all(shape: tuple[int, int]) -> None:
    assert syncline.run(partial(with_nan, shape=shape), ranks=2, fabric="torch") == [([True] * 4, True)] * 2
