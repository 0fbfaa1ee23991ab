"""Finite float32 values on which kernels are likely to differ, by kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

SMALLEST = 2.0**-149
LARGEST = torch.finfo(torch.float32).max
# Around blocks, around what kernels take at a time, and around all widths of vectors.
LENGTHS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 256, 257, 4095, 4096, 4097, 8193, 20_001]
CORNERS = [
    0.0,
    -0.0,
    SMALLEST,
    -SMALLEST,
    2.0**-126,
    LARGEST,
    -LARGEST,
    1.0,
    -1.0,
    0.5,
    63.5,
    127.0,
    2.0**-24,
    2.0**-25,
]
HALF_CORNERS = [65504.0, 65519.996, 65520.0, 6.1e-5, 5.9e-8, 2.98e-8]  # of float16


def signs(numel: int, generator: Generator) -> Tensor:
    return 2.0 * torch.randint(0, 2, (numel,), generator=generator) - 1


def any_bits(numel: int, generator: Generator) -> Tensor:
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    return torch.where(values.isfinite(), values, LARGEST)


def corners(numel: int, generator: Generator) -> Tensor:
    choice = torch.tensor(CORNERS + HALF_CORNERS)
    return choice[torch.randint(0, len(choice), (numel,), generator=generator)]


KINDS: dict[str, Callable[[int, Generator], Tensor]] = {
    "normal": lambda numel, generator: torch.randn(numel, generator=generator),
    "any bits": any_bits,
    "corners": corners,
    "huge": lambda numel, generator: signs(numel, generator) * LARGEST * torch.rand(numel, generator=generator),
    "denormal": lambda numel, generator: torch.randint(-300, 301, (numel,), generator=generator) * SMALLEST,
    "zeros of both signs": lambda numel, generator: signs(numel, generator) * 0.0,
    "equal magnitudes": lambda numel, generator: signs(numel, generator) * 1.5,
    "few magnitudes": lambda numel, generator: torch.randint(-2, 3, (numel,), generator=generator).float(),
    "between two codes": lambda numel, generator: torch.randint(-254, 255, (numel,), generator=generator) / 2 * 0.37,
    "all exponents": lambda numel, generator: (
        signs(numel, generator) * torch.randint(-149, 128, (numel,), generator=generator).float().exp2()
    ),
}


def extreme_values(kind: str, numel: int, seed: int) -> Tensor:
    """Values of a kind, which depend on the seed alone."""
    return KINDS[kind](numel, torch.Generator().manual_seed(seed))
