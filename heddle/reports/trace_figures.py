"""One figure of a trace: what makes a rollout of it long. Statistics are `heddle_trace.stats`'s."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from heddle.reports.curves import at_least
from heddle.reports.figures import COLOURS, STYLE
from heddle.runs.tables import Floats, Ints
from heddle_trace import Trace, TraceError, TraceStats
from heddle_trace.stats import Spread, ToolStats, output_totals
from heddle_trace.table import Records
from heddle_trace.writing import whole

SUFFIXES = (".png", ".svg", ".pdf")
MAX_TOOLS = 9
MAX_GROUPS = 250
"""Groups that are drawn, evenly from the shortest to the longest, each a few pixels wide."""

_MARKS = (("p50", "o"), ("p90", "D"), ("p99", "^"), ("max", "x"))
_NAME_SHOWN = 24


def figure_path(path: Path) -> Path:
    """Check the name of a figure to be drawn. Raises TraceError."""
    if path.suffix.lower() not in SUFFIXES:
        raise TraceError(f"{path}: a figure must be named *{', *'.join(SUFFIXES)}")
    return path


@contextmanager
def drawn(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Give a figure to draw on, and write it whole or not at all, in the format of the suffix.

    Names are shown as they are: no formula in them, and a box for what the font does not have. No
    date and no software are in the file: the same data give the same bytes.

    Raises:
        TraceError: another suffix.
        OSError: the disk refuses.
    """
    suffix = figure_path(path).suffix.lower().removeprefix(".")
    metadata: Any = {"png": {"Software": None}, "svg": {"Date": None}}.get(
        suffix, {"CreationDate": None}
    )
    rules = {**STYLE, "svg.hashsalt": "heddle", "text.parse_math": False}
    with mpl.rc_context(rules), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        with whole(path) as file:
            figure.savefig(file, format=suffix, dpi=150, metadata=metadata)


def draw_trace(trace: Trace, stats: TraceStats, path: Path) -> None:
    """Draw length and step tails, tool seconds, and the spread inside groups into a file.

    Raises:
        TraceError, OSError: as `drawn`.
    """
    records = Records.of(trace.records)
    totals = output_totals(records)
    with drawn(path, 11.0, 7.6) as figure:
        (outputs, steps), (tools, groups) = figure.subplots(2, 2)
        heading = f"{stats.trajectories:,} trajectories in {stats.groups.groups:,} groups"
        figure.suptitle(f"{_short(stats.name, 60)}: {heading}", x=0.01, ha="left")
        _tail(outputs, totals[~np.isnan(totals)], stats.output_tokens, "output tokens a trajectory")
        _tail(steps, records.stop - records.start, stats.steps, "steps a trajectory")
        _tool_seconds(tools, stats.tools)
        _groups(groups, records, totals, stats)


def _tail(axes: Axes, values: Floats | Ints, spread: Spread, what: str) -> None:
    """The share of trajectories that is at least so long, both on logarithmic scales."""
    ratio = (spread.max or 0.0) / spread.p50 if spread.p50 else None
    axes.set(
        title=f"{what.capitalize()}" + (f": max / median {ratio:.3g}" if ratio else ""),
        xlabel=what,
        ylabel="share that has at least so many",
    )
    if not len(values):
        _nothing(axes, "not recorded")
        return
    lengths = np.maximum(values, 1).astype(float)
    axes.step(*at_least(lengths), where="post", color=COLOURS[0])
    for index, (name, mark) in enumerate(_MARKS):
        value = getattr(spread, name)
        axes.plot(
            max(value, 1.0),
            max(float((lengths >= value).mean()), 1.0 / len(lengths)),
            mark,
            color=COLOURS[1 + index],
            markersize=7,
            linestyle="none",
            label=f"{name} {value:,.0f}",
        )
    axes.set(xscale="log", yscale="log")
    _logarithmic(axes.xaxis, lambda x: f"{x:,.0f}")
    _logarithmic(axes.yaxis, lambda share: f"{100 * share:g} %")
    axes.set_ylim(top=1.4)
    axes.legend(loc="lower left")


def _tool_seconds(axes: Axes, tools: Sequence[ToolStats]) -> None:
    """From the median to the 99th percentile of each tool's seconds, people's turns included."""
    timed = [tool for tool in tools if tool.tool_s.n]
    shown = timed[:MAX_TOOLS]
    more = f" ({len(timed) - len(shown):,} rarer tools not shown)" if len(timed) > MAX_TOOLS else ""
    axes.set(title=f"Seconds a call, by tool{more}", xlabel="seconds")
    if not shown:
        _nothing(axes, "no tool times recorded")
        return
    least = min((t.tool_s.p50 for t in shown if t.tool_s.p50), default=0.01)
    floor = max(min(least, 0.1) / 2, 1e-4)  # a logarithmic scale has no zero
    for row, tool in enumerate(shown):
        seconds = [max(getattr(tool.tool_s, name) or 0.0, floor) for name, _ in _MARKS]
        axes.plot(seconds, [row] * len(seconds), color=COLOURS[0], linewidth=1.2, zorder=1)
        for index, (name, mark) in enumerate(_MARKS):
            label = name if row == 0 else None
            axes.plot(seconds[index], row, mark, color=COLOURS[1 + index], label=label, zorder=2)
    axes.set_xscale("log")
    _logarithmic(axes.xaxis, lambda x: f"{x:,g}")
    names = [f"{_short(tool.tool)}  {tool.tool_s.n:,}" for tool in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8.0)
    axes.set_ylim(len(shown) * 1.15 + 0.2, -0.6)  # space for the legend below the last tool
    axes.legend(ncols=4, loc="lower right", fontsize=8.5)


def _groups(axes: Axes, records: Records, totals: Floats, stats: TraceStats) -> None:
    """Each group's shortest, mean and longest trajectory, groups in the order of their means."""
    share = stats.groups.within_share
    said = "" if share is None else f": {share:.0%} of the variance"
    axes.set(title=f"Within groups{said}", ylabel="output tokens")
    owned = records.trajectory("group_id").occurring().values()
    known = (totals[own][~np.isnan(totals[own])] for own in owned)
    repeated = sorted((np.maximum(m, 1.0) for m in known if len(m) > 1), key=np.mean)
    if not repeated:
        _nothing(axes, "no prompt has two samples")
        return
    at = np.unique(np.linspace(0, len(repeated) - 1, MAX_GROUPS).astype(int))
    drawn = [repeated[index] for index in at]
    x: Floats = np.arange(len(drawn), dtype=float)
    width = min(2.5, 220 / len(drawn))
    lowest, highest = [m.min() for m in drawn], [m.max() for m in drawn]
    axes.vlines(x, lowest, highest, color=COLOURS[5], linewidth=width)
    axes.plot(x, [np.mean(m) for m in drawn], ".", color=COLOURS[0], markersize=4)
    axes.set_yscale("log")
    _logarithmic(axes.yaxis, lambda y: f"{y:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(-1, len(drawn))
    thinned = f", {len(drawn):,} of {len(repeated):,}" if len(drawn) < len(repeated) else ""
    axes.set_xlabel(f"groups by mean (dot){thinned}; bars: all their samples")


def _logarithmic(axis: Axis, written: Callable[[float], str]) -> None:
    """Write out the numbers of a logarithmic scale: no powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))


def _nothing(axes: Axes, why: str) -> None:
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)


def _short(name: str, length: int = _NAME_SHOWN) -> str:
    plain = "".join(c if c.isprintable() else "?" for c in name)
    return plain if len(plain) <= length else "…" + plain[1 - length :]
