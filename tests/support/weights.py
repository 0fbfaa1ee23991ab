"""Weights that must be equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from support.references import same_bits
from support.runs import Result

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def assert_replicas(ranks: Sequence[Result], buffers: bool = True) -> None:
    """All ranks have the same bits, and have seen the same."""
    for result in ranks[1:]:
        assert len(result.state) == len(ranks[0].state)
        pairs = zip(ranks[0].tensors(buffers), result.tensors(buffers), strict=True)
        assert all(same_bits(one, other) for one, other in pairs)
        assert result.noted == ranks[0].noted


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """To this tolerance, or to what training in less than double precision comes to."""
    assert actual.keys() == expected.keys()
    for name, one in actual.items():
        widest = max(tolerance, ROUNDING.get(one.dtype, 0.0))
        torch.testing.assert_close(
            one, expected[name], rtol=widest, atol=widest, msg=lambda text, n=name: f"{n}: {text}"
        )
