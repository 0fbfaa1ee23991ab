"""Data that differs on every rank, and what must come of it. Light: ranks import this too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALVES)


def whole_numbers(rank: int, world: int, length: int, dtype: torch.dtype) -> Tensor:
    """i * W + rank. For floats i starts again before i * W * W would be rounded in fp32, or i * W in 16 bits."""
    return (steps(world, length, dtype) * world + rank).to(dtype)


def closed_form(op: str, world: int, length: int, dtype: torch.dtype) -> Tensor:
    """What all-reduce makes of `whole_numbers`; a mean of integers is cut to an integer."""
    i = steps(world, length, dtype)
    total = i * world**2 + world * (world - 1) // 2
    if op == "sum":
        return total.to(dtype)
    if op == "max":
        return (i * world + world - 1).to(dtype)
    return (total / world if dtype.is_floating_point else total // world).to(dtype)


def steps(world: int, length: int, dtype: torch.dtype) -> Tensor:
    """0, 1, 2 and so on, as far as `dtype` holds it times the world."""
    period = {torch.bfloat16: 256 // world, torch.float16: 2048 // world}.get(dtype, 4096)
    return torch.arange(length) % period


def noise(rank: int, length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random signs and magnitudes, so that the order of additions shows in the last bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    exponents = torch.randint(-6, 7, (length,), generator=generator)
    values = torch.rand(length, generator=generator, dtype=torch.float64) * 2 - 1
    return torch.ldexp(values, exponents).to(dtype)  # exact operations: the same in every process


def exact(op: str, inputs: Sequence[Tensor]) -> Tensor:
    """Sum, mean or maximum in float64."""
    stacked = torch.stack([tensor.double() for tensor in inputs])
    if op == "max":
        return stacked.amax(dim=0)
    return stacked.sum(dim=0) / (len(inputs) if op == "mean" else 1)


def left_fold(op: str, inputs: Sequence[Tensor]) -> Tensor:
    """((x0 + x1) + x2) + ..., in fp32 for 16-bit types, rounded to the type once at the end."""
    wide = torch.float32 if inputs[0].dtype in HALVES else inputs[0].dtype
    total = inputs[0].to(wide)
    for tensor in inputs[1:]:
        total = torch.maximum(total, tensor.to(wide)) if op == "max" else total + tensor.to(wide)
    return (total / len(inputs) if op == "mean" else total).to(inputs[0].dtype)


def rounding(op: str, inputs: Sequence[Tensor]) -> Tensor:
    """How far a result may be from `exact`: one rounding per addition in the wide type, and one to the narrow."""
    if op == "max":
        return torch.zeros(inputs[0].shape, dtype=torch.float64)
    dtype = inputs[0].dtype
    wide = torch.finfo(torch.float32 if dtype in HALVES else dtype)
    added = exact("sum", [tensor.abs() for tensor in inputs]) * len(inputs) * wide.eps
    bound = added / (len(inputs) if op == "mean" else 1) + wide.tiny
    if dtype not in HALVES:
        return bound
    narrow = torch.finfo(dtype)
    return bound + (exact(op, inputs).abs() + bound) * narrow.eps / 2 + narrow.smallest_normal * narrow.eps


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal as memory: -0.0 is not 0.0, and a NaN is itself."""
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def all_same_bits(results: Sequence[Tensor]) -> bool:
    """Whether every rank has the same bits."""
    return all(same_bits(results[0], result) for result in results[1:])
