"""F16: planned engines against TP 1 and TP 8 everywhere; trajectories active over time."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import COLOURS, DASHES, bars, page, save, scaled
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import across, estimate

WORKLOADS = ("coding", "search", "math")
LAYOUTS: dict[str, dict[str, Any]] = {
    "planned": {"policy": "heddle"},
    "TP 1": {"policy": "heddle+fixed+keep_engines", "tp": 1},
    "TP 8": {"policy": "heddle+fixed+keep_engines", "tp": 8},
}
PAPER = {"policy": "heddle-paper+paper_quality"}
"""The paper's parts, with a predictor of the published quality."""


def measure(context: Context) -> Measured:
    """Ratios of throughput; time in which fewer than a tenth of trajectories are active."""
    found = context.results

    def gain(fixed: str) -> Any:
        return across(
            [
                found.ratio("throughput_tok_s", LAYOUTS["planned"], LAYOUTS[fixed], workload=w)
                for w in WORKLOADS
            ]
        )

    def paper_gain(tp: int) -> Any:
        fixed = {"policy": f"{PAPER['policy']}+fixed", "tp": tp}
        return across(
            [found.ratio("throughput_tok_s", PAPER, fixed, workload=w) for w in WORKLOADS]
        )

    search = {n: found.rows(workload="search", **a) for n, a in LAYOUTS.items()}
    tails = [
        _tail_s(ours) / _tail_s(fixed)
        for ours, fixed in zip(search["planned"], search["TP 1"], strict=True)
    ]
    return Measured(
        values={
            "over_fix_1": gain("TP 1"),
            "over_fix_8": gain("TP 8"),
            "paper_over_fix_1": paper_gain(1),
            "paper_over_fix_8": paper_gain(8),
            "tail_over_fix_1": estimate(tails),
        },
        data={
            "throughput_tok_s": {
                w: {
                    n: found.estimate("throughput_tok_s", workload=w, **a).plain()
                    for n, a in LAYOUTS.items()
                }
                for w in WORKLOADS
            },
            "completion_s": {
                n: np.mean([r["completion_s"] for r in rows], axis=0).tolist()
                for n, rows in search.items()
            },
            "trajectories": search["planned"][0]["arrived"],
        },
    )


def _tail_s(row: Any) -> float:
    """Seconds from the end of nine tenths to the end of all."""
    return float(row["completion_s"][-1] - row["completion_s"][90])


def draw(data: Any, path: Path) -> None:
    """(a) throughput, (b) active trajectories, search."""
    figure, axes = page(2, width=8.0)
    series = [
        (n, [scaled(data["throughput_tok_s"][w][n], 1e-3) for w in WORKLOADS], COLOURS[i])
        for i, n in enumerate(LAYOUTS)
    ]
    bars(axes[0], WORKLOADS, series)
    axes[0].set(title="(a) Throughput", ylabel="output tokens per second (thousands)")
    axes[0].set_ylim(0, 1.3 * axes[0].get_ylim()[1])
    axes[0].legend(ncols=3)
    for index, times in enumerate(data["completion_s"].values()):
        left = data["trajectories"] * (1.0 - np.linspace(0.0, 1.0, len(times)))
        axes[1].plot([0.0, *times], [left[0], *left], DASHES[index], color=COLOURS[index])
    axes[1].set(
        title="(b) Active trajectories, search", xlabel="time (s)", xlim=(0, None), ylim=(0, None)
    )
    save(figure, path)
