"""Figures of results: regimes, clusters for a rollout, and what each part of `heddle` adds."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from heddle.comparison.waterfall import PRESET, WaterfallStep
from heddle.loops.result import LoopComparison, RegimeResult
from heddle.planning.limits import priced
from heddle.reports.colours import policy_colour
from heddle.reports.figures import COLOURS
from heddle.reports.trace_figures import drawn
from heddle.search.clusters import SearchedClusters

MARKS = "os^Dv<>PhX*"
SAVED, LOST = COLOURS[2], COLOURS[1]


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
    axes.plot([x], [row.samples_per_s], mark, color=colour, markersize=9.0, label=row.setup.label)


def draw_clusters(found: SearchedClusters, path: Path) -> None:
    """Draw seconds over dollars of each cluster, GPU-hours where a type has no price.

    Raises:
        TraceError, OSError: as `heddle.reports.trace_figures.drawn`.
    """
    with drawn(path, 7.5, 4.2) as figure:
        axes = figure.add_subplot()
        axes.step(
            [found.spent(row) for row in found.front],
            [row.makespan_s for row in found.front],
            where="post",
            color="black",
            linewidth=1.0,
            alpha=0.5,
            label="no other is faster and cheaper",
        )
        types = list(dict.fromkeys("+".join(row.gpus) for row in found.clusters))
        for place, gpu in enumerate(sorted(types)):
            mine = [row for row in found.clusters if "+".join(row.gpus) == gpu]
            axes.plot(
                [found.spent(row) for row in mine],
                [row.makespan_s for row in mine],
                MARKS[place % len(MARKS)],
                color=COLOURS[place % len(COLOURS)],
                label=gpu,
            )
            for row in mine:
                at = (found.spent(row), row.makespan_s)
                text = f"{sum(row.gpus.values())}"
                axes.annotate(text, at, xytext=(5, 4), textcoords="offset points", fontsize=8.5)
        limits, setup = found.limits, found.taken.setup
        if limits.deadline_s is not None:
            axes.axhline(limits.deadline_s, color="black", linestyle=":", linewidth=1.0)
        if limits.dollars is not None:
            axes.axvline(limits.dollars, color="black", linestyle=":", linewidth=1.0)
        dollars = priced(found.clusters)
        axes.set(
            title=f"{setup.workload.trace.name}, {setup.profiles.model}; numbers are GPUs",
            xlabel="dollars of a rollout" if dollars else "GPU-hours of a rollout",
            ylabel="makespan (s)",
            xlim=(0.0, None),
            ylim=(0.0, None),
        )
        axes.legend()


def draw_waterfall(
    steps: Sequence[WaterfallStep], path: Path, *, bound_s: float, title: str
) -> None:
    """Draw the makespan after each step, from the baseline down to `heddle`.

    Raises:
        TraceError, OSError: as `heddle.reports.trace_figures.drawn`.
    """
    with drawn(path, 8.0, 3.6) as figure:
        axes = figure.add_subplot()
        names = [*(step.name for step in steps), PRESET]
        first, *added = steps
        last_s = steps[-1].makespan_s.mean
        axes.barh(0, first.makespan_s.mean, color=policy_colour("verl"))
        axes.text(first.makespan_s.mean, 0, f" {first.makespan_s.mean:,.0f} s", va="center")
        for at, step in enumerate(added, 1):
            end_s, saved_s = step.makespan_s.mean, step.saved_s
            axes.barh(at, saved_s, left=end_s, color=SAVED if saved_s >= 0.0 else LOST)
            right_s = max(end_s, end_s + saved_s)
            axes.text(right_s, at, f" {-saved_s:+,.0f} s".replace("-0 s", "0 s"), va="center")
        axes.barh(len(steps), last_s, color=policy_colour(PRESET))
        axes.text(last_s, len(steps), f" {last_s:,.0f} s", va="center")
        axes.axvline(bound_s, color="black", linewidth=1.0, linestyle=":")
        axes.text(bound_s, -0.55, " bound", va="bottom", fontsize=8.5)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        longest_s = max(step.makespan_s.mean for step in steps)
        axes.set(title=title, xlabel="makespan (s)", xlim=(0.0, 1.12 * longest_s))
