"""A schedule for the eye: as text for a terminal.

Each round has its transfers and, for every rank, a bar with one sign per chunk. The height of the sign is the share of
all contributions that is in the chunk.

    round 1 add   0→1 [5]  1→2 [0]  2→3 [1]  3→4 [2]  4→5 [3]  5→0 [4]
                  0 ▂▂▂▂▄▃   1 ...
"""

from __future__ import annotations

from rich.text import Text

from syncline.collectives.schedule import Round, Schedule, Transfer, contributions

LEVELS = "·▁▂▃▄▅▆▇█"
MOST_TRANSFERS = 48  # in a line; more are counted
MOST_SIGNS = 400  # in the bars of a round; beyond that they are left out


def picture(schedule: Schedule) -> Text:
    """The whole schedule as coloured text."""
    text = Text()
    text.append(f"{schedule.algorithm}", style="bold")
    cost = schedule.cost
    text.append(
        f" over {schedule.world} ranks: {schedule.chunks} chunks, {cost.rounds} rounds; "
        f"no rank sends more than {float(cost.sent):.3g} × the buffer\n"
    )
    text.append("A sign is a chunk, its height the share of all contributions in it; ", style="dim")
    text.append("█", style="green")
    text.append(" is complete. [4] is chunk 4, [0-2] are chunks 0 to 2.\n\n", style="dim")
    small = schedule.world * schedule.chunks <= MOST_SIGNS
    for number, counts in enumerate(contributions(schedule)):
        if number:
            text.append_text(round_line(number - 1, schedule.rounds[number - 1]))
        if small:
            text.append_text(bars(counts, schedule.complete, "start" if number == 0 else ""))
    return text


def round_line(number: int, transfers: Round) -> Text:
    """Who sends what to whom in one round."""
    text = Text(f"{f'round {number}':<10}", style="bold")
    for op, style in (("add", "yellow"), ("copy", "cyan")):
        some = [t for t in transfers if t.op == op]
        if some:
            text.append(f"{op:<5}", style=style)
            text.append("  ".join(arrow(t) for t in some[:MOST_TRANSFERS]), style="not bold")
            text.append(f"  and {len(some) - MOST_TRANSFERS} more  " if len(some) > MOST_TRANSFERS else "  ")
    return text.append("\n")


def arrow(transfer: Transfer) -> str:
    """`0→1 [3]`"""
    last = transfer.hi - 1
    chunks = f"{transfer.lo}" if transfer.lo == last else f"{transfer.lo}-{last}"
    return f"{transfer.src}→{transfer.dst} [{chunks}]"


def bars(counts: list[list[int]], complete: int, label: str) -> Text:
    """One bar per rank."""
    text = Text(f"{label:<10}     ", style="dim")
    for rank, row in enumerate(counts):
        text.append(f"{rank} ", style="dim")
        for count in row:
            level = -(-count * (len(LEVELS) - 1) // complete)
            text.append(LEVELS[min(level, len(LEVELS) - 1)], style="green" if count == complete else "yellow")
        text.append("   ")
    return text.append("\n")
