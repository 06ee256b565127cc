"""F9: estimates are revised after every step, and come nearer to the truth."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import COLOURS, MARKERS, page, save
from experiments.harness.examples import example_run
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import exactly
from heddle_core.events import Predicted

STEPS = (0, 1, 2, 4, 8)
LEAST_STEPS = 10


def measure(context: Context) -> Measured:
    """Predicted total after each step of some trajectories; mean error after so many steps."""
    example = context.config["example"]
    with example_run(example, context.store, example["policy"]) as run:
        steps = run.steps.to_pandas()
        estimates = [
            (str(e.event.trajectory), e.event.step, e.event.remaining_tokens)
            for e in run.entries()
            if isinstance(e.event, Predicted) and e.event.remaining_tokens is not None
        ]
    steps["trajectory"] = steps["trajectory"].astype(str)
    steps["made"] = steps.groupby("trajectory")["output_tokens"].cumsum()
    made = {(t, s): m for t, s, m in steps[["trajectory", "step", "made"]].to_numpy().tolist()}
    total = steps.groupby("trajectory")["output_tokens"].sum()
    error: dict[int, list[float]] = {step: [] for step in STEPS}
    lanes: dict[str, list[list[float]]] = {}
    for name, step, remaining in estimates:
        predicted = made[name, step] + remaining
        lanes.setdefault(name, []).append([step + 1, predicted])
        left = max(total[name] - made[name, step], 1)
        if step in error:
            error[step].append(abs(np.log(max(remaining, 1.0) / left)))
    long = [name for name in lanes if len(lanes[name]) >= LEAST_STEPS]
    ranked = sorted(long, key=lambda name: int(total[name]))
    at = np.linspace(0.05, 0.95, example["shown"]) * (len(ranked) - 1)
    shown = [ranked[round(i)] for i in at]
    mean = {str(step): float(np.median(e)) for step, e in error.items()}
    return Measured(
        values={"error_late_over_first": exactly(mean["8"] / mean["0"])},
        data={
            "lanes": [{"points": lanes[n], "truth": int(total[n])} for n in shown],
            "error": mean,
        },
    )


def draw(data: Any, path: Path) -> None:
    """Left: three trajectories. Right: the error over all of them."""
    figure, axes = page(2, width=7.4)
    for index, lane in enumerate(data["lanes"]):
        x, y = zip(*lane["points"], strict=True)
        axes[0].plot(x, y, marker=MARKERS[index], ms=3.5, color=COLOURS[index])
        axes[0].axhline(lane["truth"], color=COLOURS[index], ls="--", lw=1.0)
    axes[0].set(
        title="Predicted total (dashed: the truth)",
        xlabel="steps done",
        ylabel="output tokens",
        yscale="log",
    )
    steps = [int(step) + 1 for step in data["error"]]
    axes[1].plot(steps, list(data["error"].values()), "-o", color=COLOURS[0])
    axes[1].set(
        title="Error of what remains, median",
        xlabel="steps done",
        ylabel="|ln(predicted / true)|",
        ylim=(0, None),
    )
    save(figure, path)
