"""All-gather, reduce-scatter, all-to-all, broadcast, barriers and messages, on threads."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import Tensor

import syncline
from support.patience import within
from support.reducing import rearranged, rotate
from support.references import (
    closed_form,
    same_bits,
    whole_numbers,
)
from support.tried import SHAPES, on_threads
from syncline.errors import ConfigError, Desync
from syncline.fabric.calls import DTYPES
from syncline.fabric.threads import Threads

# The other collectives


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 7, 200])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_collectives_that_rearrange(world: int, length: int, dtype: torch.dtype) -> None:
    outcomes = on_threads(partial(rearranged, length=length, dtype=dtype), world)
    inputs = [whole_numbers(rank, world, length, dtype) for rank in range(world)]
    parts = [whole_numbers(rank, world, length * world, dtype).view(world, length) for rank in range(world)]
    for name, op in [("reduce_scatter", "sum"), ("reduce_scatter mean", "mean"), ("reduce_scatter max", "max")]:
        slices = [outcome[name] for outcome in outcomes]
        assert same_bits(torch.cat(slices), closed_form(op, world, length, dtype))
        assert {len(part) for part in slices} <= {-(-length // world), 0, length % -(-length // world) if length else 0}
    for rank, outcome in enumerate(outcomes):
        assert same_bits(outcome["all_gather"], torch.stack(inputs))
        assert same_bits(outcome["all_to_all"], torch.cat([some[rank] for some in parts]))
        assert same_bits(outcome["all_to_all twice"], parts[rank].view(-1))
        assert same_bits(outcome["unchanged"], torch.cat([inputs[rank], parts[rank].view(-1)]))
        for root in range(world):
            assert same_bits(outcome[f"broadcast {root}"], inputs[root])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_of_any_shape_is_rearranged(shape: str) -> None:
    def rearrange(fabric: syncline.Fabric) -> tuple[Tensor, Tensor, Tensor]:
        x = SHAPES[shape](whole_numbers(fabric.rank, 3, 300, torch.float32))
        gathered, scattered = fabric.all_gather(x), fabric.reduce_scatter(x)
        return gathered, scattered, fabric.broadcast(x, root=1)

    outcomes = syncline.run(rearrange, ranks=3, fabric="threads")
    inputs = torch.stack([SHAPES[shape](whole_numbers(rank, 3, 300, torch.float32)).detach() for rank in range(3)])
    assert same_bits(torch.cat([scattered for _, scattered, _ in outcomes]), inputs.sum(dim=0).flatten())
    for gathered, _, from_root in outcomes:
        assert same_bits(gathered, inputs)
        assert same_bits(from_root, inputs[1])


def test_all_to_all_keeps_the_shape_and_takes_any_strides() -> None:
    def transposed(fabric: syncline.Fabric) -> Tensor:
        return fabric.all_to_all((torch.arange(12) + 100 * fabric.rank).view(4, 3).T)

    rows = torch.stack([(torch.arange(12) + 100 * rank).view(4, 3).T.reshape(-1) for rank in range(3)]).view(3, 3, 4)
    for rank, result in enumerate(syncline.run(transposed, ranks=3, fabric="threads")):
        assert torch.equal(result, rows[:, rank].reshape(3, 4))


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_reduce_scatter_and_all_gather_are_an_all_reduce(world: int) -> None:
    def both_ways(fabric: syncline.Fabric) -> tuple[Tensor, Tensor]:
        x = whole_numbers(fabric.rank, world, 10 * world, torch.float32)
        in_two = fabric.all_gather(fabric.reduce_scatter(x)).view(-1)
        return in_two, fabric.all_reduce(x)

    for in_two, in_one in on_threads(both_ways, world):
        assert same_bits(in_two, in_one)


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_nobody_leaves_a_barrier_before_all_have_come(world: int) -> None:
    arrived: list[int] = []
    lock = threading.Lock()

    def come_and_look(fabric: syncline.Fabric) -> list[int]:
        seen = []
        for turn in range(1, 6):
            with lock:
                arrived.append(fabric.rank)
            fabric.barrier()
            seen.append(len(arrived) - turn * world)
        return seen

    # Meanwhile the first ones may have come to the next barrier, but none can be two ahead.
    for seen in on_threads(come_and_look, world):
        assert all(0 <= ahead < world for ahead in seen)


# Messages


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_messages_in_flight_together_arrive_in_the_order_of_posting(world: int, count: int) -> None:
    for rank, arrived in enumerate(on_threads(partial(rotate, count=count, length=100), world)):
        left = (rank - 1) % world
        assert [tensor.tolist() for tensor in arrived] == [[10.0 * left + i] * 100 for i in range(count)]


def test_a_send_can_be_awaited_before_a_receive() -> None:
    # All ranks send and receive at once: whichever is awaited first, nobody waits for ever.
    def exchange(fabric: syncline.Fabric) -> float:
        arriving = torch.zeros(1)
        receiving = fabric.receive(arriving, 1 - fabric.rank)
        fabric.send(torch.full((1,), float(fabric.rank)), 1 - fabric.rank).wait()
        receiving.wait()
        return arriving.item()

    deadlines = syncline.Deadlines(within(1.0))
    assert syncline.run(exchange, ranks=2, fabric="threads", deadlines=deadlines) == [1.0, 0.0]


def test_a_message_needs_contiguous_memory() -> None:
    fabric = Threads().group(2).fabric(0)
    for call in (fabric.send, fabric.receive):
        with pytest.raises(ConfigError, match=r"strides \(2,\).*contiguous\(\)"):
            call(torch.ones(10)[::2], 1)


def test_a_message_that_does_not_fit_is_refused() -> None:
    def talk(fabric: syncline.Fabric) -> str:
        if fabric.rank == 0:
            fabric.send(torch.ones(10), 1)
            return ""
        with pytest.raises(Desync) as caught:
            fabric.receive(torch.ones(11), 0).wait()
        return str(caught.value)

    assert syncline.run(talk, ranks=2, fabric="threads")[1] == (
        "rank 0 sent torch.float32[10] to rank 1, which expected torch.float32[11]"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_is_flat_and_zero(dtype: torch.dtype) -> None:
    (x,) = on_threads(lambda fabric: fabric.buffer(1000, dtype), 1)
    assert same_bits(x, torch.zeros(1000, dtype=dtype))
