"""F1: trajectories alternate between generation and tools, and a few of them end last."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import COLOURS, page, save
from experiments.harness.examples import example_run
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import exactly


def measure(context: Context) -> Measured:
    """One small rollout, each trajectory as its generations and tool calls."""
    example = context.config["example"]
    with example_run(example, context.store, example["policy"]) as run:
        steps = run.steps.to_pandas()
        done = run.trajectories.to_pandas().set_index("trajectory")["finished_s"]
    lanes = []
    for name in done.sort_values().index:
        mine = steps[steps["trajectory"].astype(str) == name]
        began = (mine["dispatched_s"] + mine["engine_queued_s"]).tolist()
        ended, tool = mine["ended_s"].tolist(), mine["tool_s"].tolist()
        lanes.append(
            {
                "generates": [[a, b - a] for a, b in zip(began, ended, strict=True)],
                "calls": [[b, s] for b, s in zip(ended, tool, strict=True) if s > 0],
                "done_s": float(done[name]),
            }
        )
    times = np.sort(done.to_numpy())
    alone = 1.0 - times[int(0.9 * len(times)) - 1] / times[-1]
    return Measured(
        values={
            "slowest_over_median": exactly(times[-1] / np.median(times)),
            "share_of_last_tenth": exactly(alone),
        },
        data={"lanes": lanes},
    )


def draw(data: Any, path: Path) -> None:
    """A row per trajectory, in order of their ends."""
    figure, axes = page(height=4.2)
    for row, lane in enumerate(data["lanes"]):
        axes.broken_barh(lane["generates"], (row, 0.8), color=COLOURS[0])
        axes.broken_barh(lane["calls"], (row, 0.8), color=COLOURS[4])
    times = [lane["done_s"] for lane in data["lanes"]]
    axes.axvline(float(np.median(times)), color=COLOURS[1], ls="--", lw=1.2)
    axes.text(float(np.median(times)) + 2, 1, "half have ended", color=COLOURS[1], fontsize=8.5)
    axes.set(
        title="One rollout of coding agents: generation and tool calls of every trajectory",
        xlabel="time (s)",
        ylabel="trajectory, in order of end",
        xlim=(0, None),
    )
    axes.bar([0], [0], color=COLOURS[0], label="generates")
    axes.bar([0], [0], color=COLOURS[4], label="in a tool")
    axes.legend(loc="center right")
    save(figure, path)
