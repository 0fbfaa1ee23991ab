"""A page to look at: the loss curves of both trainings, and where each step's time went."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from syncline.bench.side_by_side import METHODS, Record, Request
from syncline.units import format_seconds

COLOURS = {"ddp": "#b45309", "syncline": "#15803d"}
PALE = {"ddp": "#fcd9a8", "syncline": "#bfe5ca"}


def write_report(records: dict[str, Record], request: Request, path: Path) -> None:
    """One file that needs nothing else."""
    titles = ("loss", *(f"{METHODS[name]}: where each step's time went" for name in records))
    figure = make_subplots(rows=1 + len(records), cols=1, subplot_titles=titles, vertical_spacing=0.09)
    for name, record in records.items():
        dash = "solid" if name == "ddp" else "dot"
        style = {"color": COLOURS[name], "dash": dash, "width": 3}
        figure.add_trace(go.Scatter(y=record.losses, name=METHODS[name], line=style), row=1, col=1)
    for row, (name, record) in enumerate(records.items(), start=2):
        compute = [step - exposed for step, exposed in zip(record.step_s, record.exposed_s, strict=True)]
        parts = (("compute", compute, PALE[name]), ("exposed communication", record.exposed_s, COLOURS[name]))
        for title, seconds, colour in parts:
            bar = go.Bar(y=[1e3 * s for s in seconds], name=f"{METHODS[name]}: {title}", marker_color=colour)
            figure.add_trace(bar, row=row, col=1)
        figure.update_yaxes(title_text="ms", row=row, col=1)
    longest = max(max(record.step_s[1:]) for record in records.values())
    for row in range(2, 2 + len(records)):
        figure.update_yaxes(range=[0, 1.1e3 * longest], row=row, col=1)
    figure.update_yaxes(title_text="cross entropy", row=1, col=1)
    figure.update_xaxes(title_text="step", row=1 + len(records), col=1)
    figure.update_layout(title=title_of(records, request), template="plotly_white", barmode="stack", height=1000)
    figure.write_html(path, include_plotlyjs=True)


def title_of(records: dict[str, Record], request: Request) -> str:
    """The result in a line."""
    ddp, ours = records["ddp"], records["syncline"]
    return (
        f"GPT of {request.size} parameters, {request.workers} processes, {request.steps} steps: "
        f"{format_seconds(ddp.median_step_s)} a step with DDP over Gloo, {format_seconds(ours.median_step_s)} with "
        f"Syncline ({ddp.median_step_s / ours.median_step_s:.2f} x)"
    )
