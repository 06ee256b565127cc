"""F: the gain from half to twice the paper's hundred trajectories for each engine."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import line, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import across, estimate

WORKLOADS = ("coding", "search")
LOADS = (50, 100, 150, 200)


def measure(context: Context) -> Measured:
    """Throughput of heddle over each baseline at every load."""
    gains = {
        w: {
            b: [context.results.gain("heddle", b, workload=w, per_engine=n) for n in LOADS]
            for b in ("verl", "slime")
        }
        for w in WORKLOADS
    }
    return Measured(
        values={
            "at_50": across([gains[w]["verl"][0] for w in WORKLOADS]),
            "at_200": across([gains[w]["verl"][-1] for w in WORKLOADS]),
            "growth": across(
                [
                    estimate([gains[w]["verl"][-1].mean / gains[w]["verl"][0].mean])
                    for w in WORKLOADS
                ]
            ),
        },
        data={
            w: {b: [v.plain() for v in values] for b, values in row.items()}
            for w, row in gains.items()
        },
    )


def draw(data: Any, path: Path) -> None:
    """A panel for each task."""
    figure, axes = page(2, width=8.0, sharey=True)
    for ax, workload in zip(axes, WORKLOADS, strict=True):
        for index, (baseline, values) in enumerate(data[workload].items()):
            line(ax, LOADS, values, baseline, index)
        ax.axhline(1.0, color="#777777", lw=0.8)
        ax.set(title=workload, xlabel="trajectories for each engine", xticks=LOADS)
    axes[0].set(ylabel="throughput of heddle over", ylim=(0, None))
    axes[0].legend()
    save(figure, path)
