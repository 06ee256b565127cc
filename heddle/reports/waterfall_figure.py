"""What each part of `heddle` adds to a baseline, as a waterfall."""

from collections.abc import Sequence
from pathlib import Path

from heddle.comparison.waterfall import PRESET, WaterfallStep
from heddle.reports.colours import policy_colour
from heddle.reports.figures import COLOURS
from heddle.reports.trace_figures import drawn

SAVED, LOST = COLOURS[2], COLOURS[1]


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
        axes.set(title=title, xlabel="makespan (s)", xlim=(0.0, 1.12 * _longest_s(steps)))


def _longest_s(steps: Sequence[WaterfallStep]) -> float:
    return max(step.makespan_s.mean for step in steps)
