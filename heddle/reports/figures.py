"""Figures of finished runs, as PNG files."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from heddle.reports.colours import DASHES, policy_colour, policy_dashes
from heddle.reports.curves import at_least, completion, mean_within, thin, under_way
from heddle.reports.labels import labels
from heddle.runs import Run
from heddle.runs.arrow_arrays import numbers_of
from heddle.runs.files import write_whole
from heddle.runs.tables import Floats, dispatches, engine_facts

# Okabe and Ito's palette, distinct under all common kinds of colour blindness. For series that are
# not policies; those have `policy_colour`.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
TIME_BINS = 400
NAMED_ENGINES = 32
"""Engines whose rows carry their shape; more labels would run into each other."""

MAX_ENGINES = 512
"""Rows of a timeline; beyond, engines are merged, since a row would be thinner than a pixel."""

STYLE: Any = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw every figure of these runs into `folder`, which is made; returns the files.

    Figures that are there are replaced: they can always be made again from the runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    overlays: Mapping[str, tuple[Callable[[Axes, Run, Mapping[str, Any]], None], str, str, str]] = {
        "completion": (_completion, "Trajectories completed", "time (s)", "share of trajectories"),
        "active": (_active, "Trajectories active", "time (s)", "trajectories"),
        "queueing": (
            _queueing,
            "Queueing delay of steps: runnable until their first prefill",
            "queueing delay (s)",
            "share of steps at least this long",
        ),
    }
    named = labels(runs)
    lines = _lines([run.manifest["policy"] for run in runs])
    files = []
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # A name may have characters that the font has not: they are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        for name, (plot, title, x, y) in overlays.items():
            figure, axes = _page(7.0, 4.2)
            for run, line in zip(runs, lines, strict=True):
                plot(axes, run, line)
            axes.set(title=f"{title} ({_trace(runs)})", xlabel=x, ylabel=y)
            axes.set_xlim(left=0.0)
            _legend(axes, named)
            files.append(_save(figure, folder / f"{name}.png"))
        for run, label in zip(runs, named, strict=True):
            own = re.sub(r"[^\w.@+-]", "_", f"timeline-{label}".replace(" ", "-"))
            files.append(_save(_timeline(run, label), folder / f"{own}.png"))
    return files


def _page(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Figure, path: Path) -> Path:
    # No software tag: the same run gives the same bytes.
    write_whole(path, lambda file: figure.savefig(file, dpi=150, metadata={"Software": None}))
    return path


def _lines(policies: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "color": policy_colour(policy),
            "linestyle": DASHES[dash],
            # Later lines are thinner, so that equal runs do not hide each other.
            "linewidth": max(3.4 - 0.8 * index, 1.0),
        }
        for index, (policy, dash) in enumerate(zip(policies, policy_dashes(policies), strict=True))
    ]


def _legend(axes: Axes, named: Sequence[str]) -> None:
    """Name the lines of `axes`, as they are: matplotlib hides labels that begin with "_"."""
    legend = axes.legend(axes.get_lines(), ["."] * len(named))
    for text, name in zip(legend.get_texts(), named, strict=True):
        text.set_text(name)
        text.set_parse_math(False)


def _trace(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(str(run.manifest["trace"]["name"]) for run in runs)
    return ", ".join(names)


def _column(table: Any, name: str) -> Floats:
    return numbers_of(table.column(name).combine_chunks(), np.nan).astype(np.float64)


def _completion(axes: Axes, run: Run, style: Mapping[str, Any]) -> None:
    table = run.trajectories
    times, share = completion(_column(table, "arrived_s"), _column(table, "finished_s"))
    axes.step(times, share, where="post", **style)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0.0, 1.02)


def _active(axes: Axes, run: Run, style: Mapping[str, Any]) -> None:
    table = run.trajectories
    times, active = under_way(_column(table, "arrived_s"), _column(table, "finished_s"))
    axes.step(*thin(times - times[0], active), where="post", **style)
    axes.set_ylim(bottom=0.0)


def _queueing(axes: Axes, run: Run, style: Mapping[str, Any]) -> None:
    steps = run.steps
    delay = _column(steps, "queueing_s") + _column(steps, "engine_queued_s")
    axes.step(*at_least(delay), where="post", **style)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")


def _timeline(run: Run, label: str) -> Figure:
    """Running steps of every engine over time, as a heat map."""
    grid, end_s, shapes = running_by_engine(run)
    figure, axes = _page(8.0, float(np.clip(1.6 + 0.09 * len(grid), 2.6, 8.0)))
    image = axes.imshow(
        grid,
        aspect="auto",
        interpolation="nearest",
        extent=(0.0, end_s, len(shapes) - 0.5, -0.5),
        cmap="cividis",
        norm=PowerNorm(0.5, vmin=0.0),
    )
    axes.grid(False)
    merged = (
        f" (a row: mean of about {len(shapes) / len(grid):.0f})" if len(grid) < len(shapes) else ""
    )
    axes.set(
        title=f"Running steps per engine: {label} ({_trace([run])})",
        xlabel="time (s)",
        ylabel=f"engine, in order of start{merged}",
    )
    if len(shapes) <= NAMED_ENGINES:
        labels = [f"{i}: {shape}" for i, shape in enumerate(shapes)]
        axes.set_yticks(range(len(labels)), labels)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, label="running steps", pad=0.01)
    return figure


def running_by_engine(run: Run) -> tuple[Floats, float, list[str]]:
    """Mean running steps in `TIME_BINS` bins; the end in seconds; the shape of each engine.

    A row for each engine in order of start, or the mean of as many as `MAX_ENGINES` rows allow.
    """
    journal = run.columns()
    d = dispatches(journal)
    trajectories = run.trajectories
    start = float(_column(trajectories, "arrived_s").min())
    end_s = float(_column(trajectories, "finished_s").max()) - start
    edges = np.linspace(0.0, max(end_s, 1e-9), TIME_BINS + 1)
    facts = engine_facts(journal)
    by_engine = np.argsort(d.engine, kind="stable")
    begin, after = (
        np.searchsorted(d.engine[by_engine], facts["engine"], side) for side in ("left", "right")
    )
    rows = []
    for a, b in zip(begin, after, strict=True):
        mine = by_engine[a:b]
        rows.append(mean_within(edges, d.dispatched_s[mine] - start, d.ended_s[mine] - start))
    grid = np.array(rows).reshape(len(rows), TIME_BINS)
    if len(grid) > MAX_ENGINES:
        groups = np.array_split(np.arange(len(grid)), MAX_ENGINES)
        grid = np.array([grid[group].mean(axis=0) for group in groups])
    return grid, end_s, facts["label"]
