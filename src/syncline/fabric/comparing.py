"""Before a call of a user, ranks compare what they are about to do.

The call is text of a fixed size, gathered from all ranks: `all_reduce(sum, float32[1000003], ring), call 7`. What
is compared is what is printed when it differs. It is gathered before any data, over the same messages.
"""

from __future__ import annotations

from time import monotonic

import torch
from torch import Tensor

from syncline.collectives.all_gather import all_gather, all_gather_at_once
from syncline.collectives.execute import Reduction, execute
from syncline.collectives.program import compile_program
from syncline.core.ranks import some_ranks
from syncline.errors import Desync
from syncline.fabric.transport import MessageTransport

HEADER_BYTES = 192
AT_ONCE = 16  # ranks up to which everyone sends to everyone; beyond, headers are passed on


def compare_calls(transport: MessageTransport, call: str) -> None:
    """Raise `Desync` on every rank unless all of them make the same call."""
    world, rank = transport.world, transport.rank
    if world == 1:
        return
    mine = encode(call)
    headers = torch.zeros(world, HEADER_BYTES, dtype=torch.uint8, device=transport.device)
    headers[rank] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    flat = headers.view(-1)

    def view(lo: int, hi: int) -> Tensor:
        return flat[lo:hi]

    schedule = all_gather_at_once(world) if world <= AT_ONCE else all_gather(world)
    program = compile_program(schedule, rank, flat.numel(), flat.numel(), 1)
    until = monotonic() + transport.deadlines.operation
    execute(program, transport, view, view, Reduction("sum", rank, world, torch.uint8), until, lambda _: None)
    gathered = headers.cpu().numpy().tobytes()
    if gathered != mine * world:
        rows = [gathered[start : start + HEADER_BYTES] for start in range(0, len(gathered), HEADER_BYTES)]
        raise Desync(desync_message([row.decode(errors="replace").strip() for row in rows]))


def encode(call: str) -> bytes:
    """Text of a fixed size."""
    return call.encode()[:HEADER_BYTES].ljust(HEADER_BYTES)


def desync_message(calls: list[str]) -> str:
    """Who called what, the most common call first."""
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(rank)
    sides = sorted(ranks.items(), key=lambda side: (-len(side[1]), side[1]))
    called = "; ".join(f"{some_ranks(who)} called {call}" for call, who in sides)
    return f"ranks differ, so nothing was sent: {called}. All ranks must make the same calls in the same order."
