"""Clusters for a rollout: makespan against dollars, and those that no other one beats in both."""

from pathlib import Path

from heddle.planning.cluster_sizes import Sizes
from heddle.reports.figures import COLOURS
from heddle.reports.trace_figures import drawn

MARKS = "os^Dv<>P"


def draw_sizes(sizes: Sizes, path: Path) -> None:
    """Draw seconds over dollars of each cluster, GPU-hours where a class has no price.

    Raises:
        TraceError, OSError: as `heddle.reports.trace_figures.drawn`.
    """
    with drawn(path, 7.5, 4.2) as figure:
        axes = figure.add_subplot()
        front = sorted((row for row in sizes.rows if sizes.on_front(row)), key=sizes.spent)
        axes.step(
            [sizes.spent(row) for row in front],
            [row.makespan_s for row in front],
            where="post",
            color="black",
            linewidth=1.0,
            alpha=0.5,
            label="no other is faster and cheaper",
        )
        classes = list(dict.fromkeys(row.gpu for row in sizes.rows))
        for place, gpu in enumerate(sorted(classes)):
            mine = [row for row in sizes.rows if row.gpu == gpu]
            axes.plot(
                [sizes.spent(row) for row in mine],
                [row.makespan_s for row in mine],
                MARKS[place % len(MARKS)],
                color=COLOURS[place % len(COLOURS)],
                label=gpu,
            )
            for row in mine:
                at = (sizes.spent(row), row.makespan_s)
                axes.annotate(
                    f"{row.gpus}", at, xytext=(5, 4), textcoords="offset points", fontsize=8.5
                )
        limits = sizes.limits
        if limits.deadline_s is not None:
            axes.axhline(limits.deadline_s, color="black", linestyle=":", linewidth=1.0)
        if limits.dollars is not None:
            axes.axvline(limits.dollars, color="black", linestyle=":", linewidth=1.0)
        kind = "simulated" if sizes.simulated else "estimated"
        axes.set(
            title=f"{sizes.trace}, {sizes.model}; numbers are GPUs",
            xlabel="dollars of a rollout" if sizes.priced else "GPU-hours of a rollout",
            ylabel=f"makespan (s), {kind}",
            xlim=(0.0, None),
            ylim=(0.0, None),
        )
        axes.legend()
