"""Sparse gradients: every rank's entries are gathered, and added where they meet.

Ranks have different numbers of entries, so these are gathered first, and everyone sends as many as the one that has
most. Wire: W times the largest number of entries, each an index and a row. The gradient of a weight that is also used
elsewhere is dense, and stays so.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncline.fabric.base import Fabric

NOTHING = -1  # entries of a rank that had no gradient


def average_sparse(fabric: Fabric, parameter: nn.Parameter, present: bool = True) -> None:
    """Replace a sparse gradient by its mean over ranks. None stays None where no rank had one."""
    gradient = parameter.grad if present else None
    mine = None if gradient is None else rows_of(gradient.detach())
    entries = NOTHING if mine is None else mine.indices().shape[1]
    is_dense = gradient is not None and not gradient.is_sparse
    told = fabric.all_gather(torch.tensor([[entries, is_dense]], device=fabric.device)).reshape(-1, 2)
    counts, any_dense = told[:, 0].tolist(), bool(told[:, 1].any())
    most = max(counts)
    if most == NOTHING:
        return
    indices = torch.zeros(most, dtype=torch.int64, device=fabric.device)
    values = torch.zeros(most, *parameter.shape[1:], dtype=parameter.dtype, device=fabric.device)
    if mine is not None:
        indices[:entries] = mine.indices()[0]
        values[:entries] = mine.values()
    all_indices, all_values = fabric.all_gather(indices), fabric.all_gather(values)
    if present:
        mean = mean_of_entries(counts, all_indices, all_values, parameter)
        parameter.grad = mean.to_dense() if any_dense else mean


def rows_of(gradient: Tensor) -> Tensor:
    """Its rows that are not zero."""
    return gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)


def mean_of_entries(counts: list[int], indices: Tensor, values: Tensor, parameter: Tensor) -> Tensor:
    """The sum in order of rank, divided by their number."""
    kept = [(indices[rank, : max(count, 0)], values[rank, : max(count, 0)]) for rank, count in enumerate(counts)]
    where = torch.cat([some for some, _ in kept])
    what = torch.cat([some for _, some in kept])
    total = torch.sparse_coo_tensor(where.unsqueeze(0), what, parameter.shape, check_invariants=False)
    return (total.coalesce() / len(counts)).coalesce()
