"""Style of experiments' figures: one palette, one size, units on every axis."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from heddle.reports.colours import DASHES as DASHES
from heddle.reports.colours import policy_colour
from heddle.reports.figures import COLOURS as COLOURS
from heddle.reports.figures import STYLE

MAX_BYTES = 150_000
OWN: Any = {
    **STYLE,
    "font.size": 9.5,
    "axes.titlesize": 10.0,
    "legend.fontsize": 8.5,
    "axes.axisbelow": True,
}
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "++")
MARKERS = "osD^vPX*"


def page(
    columns: int = 1, rows: int = 1, *, width: float = 7.0, height: float = 3.2, **options: Any
) -> tuple[Figure, Any]:
    """Return a figure and its axes, in a grid."""
    mpl.rcParams.update(OWN)  # for this process, which draws nothing else
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **options)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG; equal figures give equal bytes.

    Raises:
        ValueError: it is too large to be committed.
    """
    figure.savefig(path, dpi=120, metadata={"Software": None})
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}")


def scaled(value: Mapping[str, float], factor: float) -> dict[str, float]:
    """A value as JSON in another unit."""
    return {**value, **{key: value[key] * factor for key in ("mean", "low", "high")}}


def colour(policy: str) -> str:
    """Colour of a policy in every figure; the bound, which none reaches, is black."""
    return "#000000" if policy == "bound" else policy_colour(policy)


def bars(
    axes: Axes,
    labels: Sequence[str],
    series: Sequence[tuple[str, Sequence[dict[str, Any] | None], str]],
    *,
    numbers: bool = False,
) -> None:
    """Draw groups of bars with error bars; a series is (name, values as JSON, colour)."""
    width = 0.8 / max(len(series), 1)
    for place, (name, values, shade) in enumerate(series):
        at = [i - 0.4 + width * (place + 0.5) for i in range(len(labels))]
        known = [(x, v) for x, v in zip(at, values, strict=True) if v is not None]
        heights = [v["mean"] for _, v in known]
        axes.bar(
            [x for x, _ in known],
            heights,
            width * 0.94,
            label=name,
            color=shade,
            hatch=HATCHES[place % len(HATCHES)],
            edgecolor="white",
            linewidth=0.4,
        )
        errors = [
            [max(v["mean"] - v["low"], 0.0) * _drawn(v) for _, v in known],
            [max(v["high"] - v["mean"], 0.0) * _drawn(v) for _, v in known],
        ]
        if any(map(any, errors)):
            axes.errorbar(
                [x for x, _ in known], heights, errors, fmt="none", ecolor="#444444", elinewidth=0.8
            )
        if numbers:
            for x, v in known:
                axes.annotate(
                    f"{v['mean']:.2g}",
                    (x, v["mean"]),
                    ha="center",
                    va="bottom",
                    fontsize=7.5,
                    xytext=(0, 1),
                    textcoords="offset points",
                )
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(axis="x", visible=False)


def _drawn(value: Mapping[str, Any]) -> bool:
    """Whether a spread is shown: the interval of two rollouts would hide everything else."""
    return bool(value.get("n", 1) >= 3)


def line(
    axes: Axes, x: Sequence[float], values: Sequence[dict[str, Any]], name: str, index: int
) -> None:
    """Draw a line with a band for its spread."""
    shade = colour(name)
    axes.plot(
        x, [v["mean"] for v in values], marker=MARKERS[index], ms=4.5, color=shade, label=name
    )
    low, high = [v["low"] for v in values], [v["high"] for v in values]
    if all(map(_drawn, values)) and any(a < b for a, b in zip(low, high, strict=True)):
        axes.fill_between(x, low, high, color=shade, alpha=0.15, linewidth=0)


def ratio_bars(data: Mapping[str, float], path: Path) -> None:
    """A bar for each ratio."""
    figure, ax = page(1, width=7.0)
    ax.barh(list(data), list(data.values()))
    ax.axvline(1.0, color="#777777", lw=0.8)
    ax.set(xlabel="ratio")
    save(figure, path)
