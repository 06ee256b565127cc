"""E: how precise predictions must be."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import COLOURS, line, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import Value, across

WORKLOADS = ("coding", "search")
NOISE = {
    0.0: "heddle+oracle",
    0.25: "heddle+noisy-oracle:0.25",
    0.5: "heddle+noisy-oracle:0.5",
    1.0: "heddle+noisy-oracle:1.0",
    2.0: "heddle+noisy-oracle:2.0",
}


def measure(context: Context) -> Measured:
    """Makespan over that with exact lengths, by log-normal error; and what is learnt in a run."""

    def over(policy: str, workload: str) -> Value:
        return context.results.ratio(
            "makespan_s", {"policy": policy}, {"policy": NOISE[0.0]}, workload=workload
        )

    curves = {w: {str(s): over(p, w) for s, p in NOISE.items()} for w in WORKLOADS}
    lines = {w: {p: over(p, w) for p in ("heddle", "verl")} for w in WORKLOADS}
    return Measured(
        values={
            "sigma_quarter": across([curves[w]["0.25"] for w in WORKLOADS]),
            "sigma_one": across([curves[w]["1.0"] for w in WORKLOADS]),
            "sigma_two": across([curves[w]["2.0"] for w in WORKLOADS]),
            "learnt": across([lines[w]["heddle"] for w in WORKLOADS]),
            "verl_over_sigma_one": across(
                [
                    context.results.ratio(
                        "makespan_s", {"policy": "verl"}, {"policy": NOISE[1.0]}, workload=w
                    )
                    for w in WORKLOADS
                ]
            ),
        },
        data={
            "curves": {w: {k: v.plain() for k, v in c.items()} for w, c in curves.items()},
            "lines": {w: {k: v.plain() for k, v in c.items()} for w, c in lines.items()},
        },
    )


def draw(data: Any, path: Path) -> None:
    """A panel for each task."""
    figure, axes = page(2, width=8.0, sharey=True)
    for ax, workload in zip(axes, WORKLOADS, strict=True):
        curve = data["curves"][workload]
        line(ax, [float(s) for s in curve], list(curve.values()), "heddle, noisy lengths", 0)
        for index, (policy, value) in enumerate(data["lines"][workload].items()):
            name = {"heddle": "heddle, learns in the run"}.get(policy, policy)
            style = "--" if index == 0 else ":"
            ax.axhline(value["mean"], color=COLOURS[2 - index], ls=style, label=name)
        ax.set(title=workload, xlabel="error of predictions (sigma of its natural log)")
    axes[0].set(ylabel="makespan over that with exact lengths", ylim=(0, None))
    axes[0].legend(loc="lower right")
    save(figure, path)
