"""F3: a framework that schedules steps sends those of one trajectory to any free engine."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import colour, page, save
from experiments.harness.examples import example_run
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import exactly

LONG = 12
"""Least steps of the trajectory that is shown."""


def measure(context: Context) -> Measured:
    """Engine and recomputed prompt of every step of one trajectory, under each policy."""
    example = context.config["example"]
    lanes, hits, engines = {}, {}, {}
    chosen = ""
    for policy in example["policies"]:
        with example_run(example, context.store, policy) as run:
            steps = run.steps.to_pandas()
            hits[policy] = run.summary["prefix_hit_resumed"]
        steps["trajectory"] = steps["trajectory"].astype(str)
        if not chosen:
            count = steps.groupby("trajectory").size()
            chosen = str(count[count >= LONG].sort_values().index[0])
        mine = steps[steps["trajectory"] == chosen]
        names = sorted(mine["engine"].astype(str).unique())
        engines[policy] = len(names)
        lanes[policy] = {
            "engine": mine["engine"].astype(str).str[1:].astype(int).tolist(),
            "prefilled": (mine["prompt_tokens"] - mine["cached_tokens"]).clip(lower=0).tolist(),
            "hit": hits[policy],
        }
    return Measured(
        values={
            "engines_of_one_trajectory": exactly(engines["slime"]),
            "prefix_hit": exactly(hits["slime"] / hits["verl"]),
        },
        data=lanes,
    )


def draw(data: Any, path: Path) -> None:
    """Above: where each step ran. Below: what had to be prefilled for it."""
    figure, axes = page(len(data), 2, height=4.0, sharex="col", sharey="row")
    most = max(max(lane["prefilled"]) for lane in data.values())
    for column, (policy, lane) in enumerate(data.items()):
        top, below = axes[0][column], axes[1][column]
        steps = np.arange(len(lane["engine"]))
        shade = colour(policy)
        top.plot(steps, lane["engine"], "-o", color=shade, ms=4, lw=1)
        below.bar(steps, lane["prefilled"], color=shade)
        top.set_title(f"{policy}: prefix hit {lane['hit']:.0%}")
        below.set(xlabel="step", ylim=(0, 1.05 * most))
    axes[0][0].set(ylabel="engine", yticks=range(4))
    axes[1][0].set(ylabel="prompt tokens prefilled")
    save(figure, path)
