"""F4: completion times over their median, sticky placement and first come first served."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import COLOURS, DASHES, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import across, estimate

WORKLOADS = ("coding", "search", "math")


def measure(context: Context) -> Measured:
    """Slowest over median for each workload, and the curves."""
    slowest, curves = {}, {}
    for workload in WORKLOADS:
        rows = context.results.rows(workload=workload)
        over = [np.array(row["completion_s"]) / row["completion_s"][50] for row in rows]
        slowest[workload] = estimate([float(curve[-1]) for curve in over])
        curves[workload] = np.mean(over, axis=0).tolist()
    return Measured(
        values={
            "slowest_over_median": across(list(slowest.values())),
            "slowest_over_median_coding": slowest["coding"],
        },
        data={"curves": curves, "slowest": {w: v.plain() for w, v in slowest.items()}},
    )


def draw(data: Any, path: Path) -> None:
    """A curve for each workload."""
    figure, axes = page(height=3.0)
    shares = np.linspace(0.0, 100.0, 101)
    for index, (workload, curve) in enumerate(data["curves"].items()):
        last = data["slowest"][workload]["mean"]
        axes.plot(
            curve,
            shares,
            color=COLOURS[index],
            ls=DASHES[index],
            label=f"{workload}: slowest {last:.1f} times the median",
        )
    axes.axvline(1.0, color="#777777", lw=0.8)
    axes.set(
        title="Completion under verl: pinned, first come first served",
        xlabel="completion time over the median",
        ylabel="trajectories done (%)",
        xlim=(0, None),
        ylim=(0, 101),
    )
    axes.legend(loc="lower right")
    save(figure, path)
