"""I: real recorded traces under every preset."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import COLOURS, page, save
from experiments.harness.experiment import Context, Measured

TRACES = ("tbench_mini", "tau2_retail", "cc_weka")


def measure(context: Context) -> Measured:
    """Makespans, shares of the bound, and the gain over verl on each trace."""
    found = context.results
    cells: dict[str, Any] = {}
    for trace in TRACES:
        policies = dict.fromkeys(a["policy"] for a, _ in found.all if a["workload"] == trace)
        cells[trace] = {}
        for policy in policies:
            row = found.rows(workload=trace, policy=policy)[0]
            cells[trace][policy] = {
                "makespan_s": row["makespan_s"],
                "bound": row["bound_s"] / row["makespan_s"],
                "prefix_hit": row["prefix_hit"],
            }
    return Measured(
        values={f"gain_{t}": found.gain("heddle", "verl", workload=t) for t in TRACES},
        data=cells,
    )


def draw(data: Any, path: Path) -> None:
    """Share of the bound by policy, a panel for each trace."""
    figure, axes = page(3, width=9.0, height=3.6, sharey=True)
    policies = list(data[TRACES[0]])[::-1]
    for ax, trace in zip(axes, TRACES, strict=True):
        shares = [data[trace][p]["bound"] for p in policies]
        shades = [COLOURS[0] if p.startswith("heddle") else COLOURS[1] for p in policies]
        ax.barh(np.arange(len(policies)), shares, color=shades)
        for y, share in enumerate(shares):
            ax.text(share + 0.01, y, f"{share:.2f}", va="center", fontsize=7.5)
        ax.set(title=trace, xlim=(0, 1.15), xlabel="lower bound over makespan")
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(policies)), policies, fontsize=8)
    save(figure, path)
