"""The results as a page to look at: time and bandwidth by size, for every contender and world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from syncline.bench.codecs import CodecSpeed
from syncline.bench.collectives import Results
from syncline.bench.convergence import ConvergenceRow
from syncline.units import format_bytes

COLOURS = {
    "syncline": "#15803d",
    "syncline private": "#86c79a",
    "gloo": "#b45309",
    "open mpi": "#0369a1",
    "mpich": "#7e22ce",
    "limit": "#9ca3af",
}


def write_codec_plot(speeds: Sequence[CodecSpeed], path: Path) -> None:
    """Time to average a bucket against the speed of the link, for every codec; one file that needs nothing else."""
    figure = go.Figure()
    links = [10 ** (exponent / 8) for exponent in range(-8, 17)]  # Gbit/s
    for one in speeds:
        seconds = [1e3 * one.seconds_on(link) for link in links]
        width = 4 if one.codec == "none" else 2
        figure.add_trace(go.Scatter(x=links, y=seconds, name=one.codec, line={"width": width}))
    figure.update_xaxes(type="log", title_text="link, Gbit/s")
    figure.update_yaxes(type="log", title_text="ms to average a bucket")
    figure.update_layout(title="When a codec pays: below the line of none", template="plotly_white", height=700)
    figure.write_html(path, include_plotlyjs=True)


def write_convergence_plot(rows: Sequence[ConvergenceRow], path: Path) -> None:
    """The loss while training, for every codec and workload; one file that needs nothing else."""
    titles = list(dict.fromkeys(row.title for row in rows))
    names = list(dict.fromkeys(row.codec for row in rows))
    figure = make_subplots(rows=len(titles), cols=1, subplot_titles=titles, vertical_spacing=0.1)
    for row in rows:
        place = 1 + titles.index(row.title)
        steps = [row.steps * (point + 1) / len(row.curve) for point in range(len(row.curve))]
        line = {
            "color": qualitative.Dark24[names.index(row.codec) % len(qualitative.Dark24)],
            "width": 4 if row.codec == "none" else 2,
        }
        style = {"name": row.codec, "legendgroup": row.codec, "showlegend": place == 1, "line": line}
        figure.add_trace(go.Scatter(x=steps, y=row.curve, **style), row=place, col=1)
        figure.update_yaxes(title_text="cross entropy", type="log", row=place, col=1)
    figure.update_xaxes(title_text="step", row=len(titles), col=1)
    title = f"Loss while training, mean of {rows[0].ranks} ranks and {rows[0].seeds} seeds"
    figure.update_layout(title=title, template="plotly_white", height=500 * len(titles))
    figure.write_html(path, include_plotlyjs=True)


def write_plot(results: Results, path: Path) -> None:
    """One file that needs nothing else."""
    worlds, sizes = results.worlds(), results.sizes()
    titles = [f"{ranks} ranks: {what}" for what in ("time", "bandwidth") for ranks in worlds]
    figure = make_subplots(rows=2, cols=len(worlds), subplot_titles=titles, vertical_spacing=0.12)
    for column, ranks in enumerate(worlds, start=1):
        for name in results.contenders():
            seconds = [results.seconds(name, ranks, size) for size in sizes]
            times = [None if s is None else s * 1e6 for s in seconds]
            rates = [None if s is None else size / s / 1e9 for s, size in zip(seconds, sizes, strict=True)]
            style = {"color": COLOURS[name], "dash": "dot" if name == "limit" else "solid"}
            for row, values in ((1, times), (2, rates)):
                figure.add_trace(
                    go.Scatter(
                        x=sizes,
                        y=values,
                        name=name,
                        legendgroup=name,
                        showlegend=row == 1 and column == 1,
                        line=style,
                        mode="lines+markers",
                    ),
                    row=row,
                    col=column,
                )
    ticks = {"type": "log", "tickvals": sizes, "ticktext": [format_bytes(size) for size in sizes], "tickangle": -45}
    figure.update_xaxes(**ticks)
    figure.update_yaxes(type="log", row=1)
    figure.update_yaxes(title_text="µs a call", row=1, col=1)
    figure.update_yaxes(title_text="GB/s", row=2, col=1)
    figure.update_layout(
        title="All-reduce on one machine (float32, medians)", template="plotly_white", height=800, hovermode="x unified"
    )
    figure.write_html(path, include_plotlyjs=True)
