"""A schedule as an SVG drawing: ranks side by side, time downwards, an arrow for every transfer.

Bars under each rank show its chunks, darker the more contributions they hold and green when complete. Arrows that add
are solid, arrows that copy are dashed.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from syncline.collectives.schedule import Schedule, Transfer, contributions

COLUMN, ROW, BAR, TOP, LEFT = 110, 62, 12, 74, 84
ADD, COPY, DONE = "#b45309", "#0369a1", "#15803d"


def svg(schedule: Schedule) -> str:
    """The whole drawing as text."""
    width = LEFT + COLUMN * schedule.world
    height = TOP + (ROW + BAR) * (len(schedule.rounds) + 1) + 16
    title = f"{schedule.algorithm} over {schedule.world} ranks"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="11" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="context-stroke"/></marker></defs>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="42" fill="#555">{schedule.chunks} chunks, {len(schedule.rounds)} rounds, at most '
        f"{float(schedule.cost.sent):.3g} × the buffer sent per rank</text>",
        *headings(schedule),
    ]
    for number, counts in enumerate(contributions(schedule)):
        parts += bars(schedule, number, counts)
        if number < len(schedule.rounds):
            parts += round_of_arrows(schedule, number)
    return "\n".join([*parts, "</svg>", ""])


def headings(schedule: Schedule) -> Iterator[str]:
    """The names of the ranks."""
    for rank in range(schedule.world):
        yield f'<text x="{middle(rank)}" y="{TOP - 10}" text-anchor="middle" font-weight="bold">rank {rank}</text>'


def bars(schedule: Schedule, number: int, counts: list[list[int]]) -> Iterator[str]:
    """The chunks of every rank before round `number`."""
    complete, cell = schedule.complete, (COLUMN - 24) / schedule.chunks
    gap = 0.0 if cell < 3 else 1.0
    for rank, row in enumerate(counts):
        x = middle(rank) - (COLUMN - 24) / 2
        for chunk, count in enumerate(row):
            colour = DONE if count == complete else ADD
            shade = 0.08 + 0.92 * count / complete if count else 0.03
            yield (
                f'<rect x="{x + chunk * cell:.2f}" y="{line(number)}" width="{cell - gap:.2f}" height="{BAR}" '
                f'fill="{colour}" fill-opacity="{shade:.2f}"/>'
            )


def round_of_arrows(schedule: Schedule, number: int) -> Iterator[str]:
    """The transfers of one round, between two rows of bars."""
    above, below = line(number) + BAR + 3, line(number + 1) - 3
    yield f'<text x="12" y="{(above + below) / 2 + 4}" fill="#555">round {number}</text>'
    for transfer in schedule.rounds[number]:
        yield arrow(transfer, above, below, label=len(schedule.rounds[number]) <= 3 * schedule.world)


def arrow(transfer: Transfer, above: float, below: float, label: bool) -> str:
    """One transfer; its label stands near its tail, where arrows have not met yet."""
    colour, dash = (ADD, "") if transfer.op == "add" else (COPY, ' stroke-dasharray="5 3"')
    x1, x2 = middle(transfer.src), middle(transfer.dst)
    drawn = (
        f'<line x1="{x1}" y1="{above}" x2="{x2}" y2="{below}" stroke="{colour}" stroke-width="1.4"{dash} '
        f'marker-end="url(#tip)"/>'
    )
    if not label:
        return drawn
    share = 0.26
    chunks = f"{transfer.lo}" if transfer.hi == transfer.lo + 1 else f"{transfer.lo}–{transfer.hi - 1}"
    x, y = x1 + (x2 - x1) * share, above + (below - above) * share
    return drawn + (
        f'<text x="{x:.1f}" y="{y + 3:.1f}" fill="{colour}" font-size="10" text-anchor="middle" stroke="white" '
        f'stroke-width="3" paint-order="stroke">{chunks}</text>'
    )


def middle(rank: int) -> float:
    """Where a rank stands."""
    return LEFT + COLUMN * (rank + 0.5)


def line(number: int) -> float:
    """Where the bars before round `number` are."""
    return TOP + (ROW + BAR) * number
