"""What regimes gain, and what they pay for it."""

from pathlib import Path

from matplotlib.axes import Axes

from heddle.loop.result import LoopComparison, RegimeResult
from heddle.reports.figures import COLOURS
from heddle.reports.trace_figures import drawn

MARKS = "os^Dv<>PhX*"


def draw_regimes(result: LoopComparison, path: Path) -> None:
    """Draw trained samples a second over staleness, and over length bias.

    Raises:
        TraceError, OSError: as `heddle.reports.trace_figures.drawn`.
    """
    with drawn(path, 10.0, 4.2) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for place, row in enumerate(result.regimes):
            colour = COLOURS[place % len(COLOURS)]
            mark = MARKS[place % len(MARKS)]
            _point(left, row, row.mean_staleness, colour, mark)
            _point(right, row, row.length_bias, colour, mark)
        left.set(
            title="Throughput and staleness",
            xlabel="mean staleness of a trained trajectory (weight updates)",
            ylabel="trained samples a second",
            ylim=(0.0, None),
        )
        right.set(
            title="Throughput and length bias",
            xlabel="mean output of trained over started trajectories",
        )
        right.axvline(1.0, color="black", linewidth=0.8, alpha=0.4)
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4)


def _point(axes: Axes, row: RegimeResult, x: float, colour: str, mark: str) -> None:
    axes.plot([x], [row.samples_per_s], mark, color=colour, markersize=9.0, label=row.setup.name)
