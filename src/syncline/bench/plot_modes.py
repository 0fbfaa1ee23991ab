"""Workers of uneven speed as a page to look at: the loss against time, and how many steps were made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from syncline.bench.stragglers import SITUATIONS, Outcome

COLOURS = ("#111827", "#7e22ce", "#b45309", "#86c79a", "#15803d", "#065f46", "#0369a1", "#be123c", "#9ca3af")


def write_straggler_plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """A row for every situation; one file that needs nothing else."""
    situations = list(dict.fromkeys(one.situation for one in outcomes))
    colours = dict(zip(dict.fromkeys(one.mode for one in outcomes), COLOURS * len(outcomes), strict=False))
    titles = [part for name in situations for part in (f"{name}: {SITUATIONS[name]}", "steps/s of all workers")]
    spacing = 0.25 / len(situations)
    figure = make_subplots(
        len(situations), 2, subplot_titles=titles, column_widths=[0.65, 0.35], vertical_spacing=spacing
    )
    for one in outcomes:
        row = 1 + situations.index(one.situation)
        shown = {"name": one.mode, "legendgroup": one.mode}
        seconds, losses = zip(*one.curve, strict=True)
        curve = go.Scatter(x=seconds, y=losses, line={"color": colours[one.mode]}, showlegend=row == 1, **shown)
        bar = go.Bar(x=[one.mode], y=[one.steps_per_s], marker_color=colours[one.mode], showlegend=False, **shown)
        figure.add_trace(curve, row=row, col=1)
        figure.add_trace(bar, row=row, col=2)
    figure.update_yaxes(title_text="loss on unseen text", col=1)
    figure.update_xaxes(title_text="seconds", row=len(situations), col=1)
    figure.update_layout(title="Workers of uneven speed", template="plotly_white", height=200 + 380 * len(situations))
    figure.write_html(path, include_plotlyjs=True)
