"""Before a collective, ranks compare what they are about to do.

The call is text of a fixed size, gathered from all ranks: `all_reduce(sum, float32[1000003], ring), call 7`. What
is compared is what is printed when it differs. It is gathered before any data, over the same messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from syncline.collectives.all_gather import all_gather, all_gather_at_once
from syncline.collectives.execute import Reduction, execute
from syncline.collectives.program import compile_program
from syncline.core.ranks import some_ranks
from syncline.errors import Desync

if TYPE_CHECKING:
    from syncline.fabric.messages import MessageFabric

HEADER_BYTES = 192
AT_ONCE = 16  # ranks up to which everyone tells everyone; beyond, the word is passed on


def compare_calls(fabric: MessageFabric, call: str, until: float) -> None:
    """Raise `Desync` on every rank unless all of them say the same."""
    world, rank = fabric.world, fabric.rank
    mine = encode(call)
    headers = torch.zeros(world, HEADER_BYTES, dtype=torch.uint8, device=fabric.device)
    headers[rank] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    flat = headers.view(-1)

    def view(lo: int, hi: int) -> Tensor:
        return flat[lo:hi]

    schedule = all_gather_at_once(world) if world <= AT_ONCE else all_gather(world)
    program = compile_program(schedule, rank, flat.numel(), flat.numel(), 1)
    execute(program, fabric, view, view, Reduction("sum", rank, world, torch.uint8), until, lambda _: None)
    told = headers.cpu().numpy().tobytes()
    if told != mine * world:
        rows = [told[start : start + HEADER_BYTES] for start in range(0, len(told), HEADER_BYTES)]
        raise Desync(difference([row.decode(errors="replace").strip() for row in rows]))


def encode(call: str) -> bytes:
    """Text of a fixed size."""
    return call.encode()[:HEADER_BYTES].ljust(HEADER_BYTES)


def difference(calls: list[str]) -> str:
    """Who called what, the most common call first."""
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(rank)
    sides = sorted(ranks.items(), key=lambda side: (-len(side[1]), side[1]))
    told = "; ".join(f"{some_ranks(who)} called {call}" for call, who in sides)
    return f"ranks differ, so nothing was sent: {told}. All ranks must make the same calls in the same order."
