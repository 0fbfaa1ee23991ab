"""What collectives are tried on."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

import syncline
from support.catalogue import COLLECTIVES, uneven_hosts
from support.reducing import Case
from syncline.collectives.execute import OPS
from syncline.fabric.calls import DTYPES
from syncline.fabric.threads import Threads

WORLDS = (*range(1, 10), 13, 16)
EVERY_ONE = (*COLLECTIVES, "auto")


def on_threads(work, world: int) -> list:
    """Run on threads that pretend to be on hosts of unequal size."""
    return syncline.run(work, ranks=world, fabric=Threads(host_sizes=uneven_hosts(world)))


def lengths(world: int) -> st.SearchStrategy[int]:
    """None, fewer than ranks, one more, a prime, a round number, and several segments per chunk."""
    return st.sampled_from(sorted({0, 1, world - 1, world + 1, 17, 1000, 1009})) | st.integers(0, 1100)


@st.composite
def cases(draw, collective: str, dtypes=DTYPES) -> tuple[int, Case]:
    world = draw(st.sampled_from(WORLDS))
    case = Case(collective, draw(lengths(world)), draw(st.sampled_from(dtypes)), draw(st.sampled_from(OPS)))
    return world, case


SHAPES = {
    "two dimensions": lambda x: x.view(10, 30),
    "a transposed matrix": lambda x: x.view(10, 30).T.clone(memory_format=torch.preserve_format),
    "every second element": lambda x: torch.stack([x, torch.zeros_like(x)], dim=1)[:, 0],
    "a part of a larger tensor": lambda x: torch.cat([x, x, x])[len(x) : 2 * len(x)],
    "a scalar": lambda x: x.sum(),
    "an empty matrix": lambda x: x[:0].view(0, 3),
    "a leaf that requires a gradient": lambda x: x.clone().requires_grad_(x.is_floating_point()),
    "a matrix that requires a gradient": lambda x: x.view(10, 30).T.detach().requires_grad_(x.is_floating_point()),
}
