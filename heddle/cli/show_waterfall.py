"""What each part of `heddle` adds to a baseline, as text."""

from collections.abc import Sequence

import rich_click as click

from heddle.cli.show import comparison_head, estimate_cell, new_table, show
from heddle.comparison.compare import Comparison
from heddle.comparison.waterfall import PRESET, WaterfallStep


def show_waterfall(result: Comparison, steps: Sequence[WaterfallStep]) -> None:
    """Trace, cluster, bound, and one row for each step."""
    comparison_head(result)
    table = new_table("step", "makespan_s", "saved_s", "share of gain", "of bound")
    for step in steps:
        first = step is steps[0]
        table.add_row(
            step.name,
            estimate_cell(step.makespan_s),
            "" if first else f"{step.saved_s:+,.1f}",
            "" if step.share is None else f"{step.share:.0%}".replace("%", " %"),
            f"{result.bound.makespan_s / step.makespan_s.mean:.2f}",
        )
    show(table)
    untuned, tuned, last = steps[0], steps[1], steps[-1]
    said = [f"{_saved(last, each)} against {each.policy}" for each in (tuned, untuned)]
    click.echo(f"{PRESET} saves {said[0]}, its best TP degree, and {said[1]}")
    click.echo("each step keeps those before it; the best TP degree is found on the same trace")
    seeds = len(result.policies[0].runs)
    if seeds > 1:
        click.echo(f"means over {seeds} seeds, ± 95 % confidence interval of the mean")


def _saved(step: WaterfallStep, other: WaterfallStep) -> str:
    return f"{1.0 - step.makespan_s.mean / other.makespan_s.mean:.1%}".replace("%", " %")
