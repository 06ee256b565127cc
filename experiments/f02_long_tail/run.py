"""F2: output tokens of a trajectory and seconds of a tool call have long tails."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import COLOURS, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.store import ROOT
from experiments.harness.values import exactly
from heddle_trace import read_trace, synth
from heddle_trace.schema import TrajectoryRecord

SHARES = np.linspace(0.0, 1.0, 201)


def measure(context: Context) -> Measured:
    """Distributions of a synthetic rollout, and of a recorded one where it is there."""
    trace = context.config["trace"]
    shown = {"synthetic": synth(trace["workload"], trace["trajectories"], trace["seed"])}
    recorded = ROOT / trace["recorded"]
    if recorded.exists():
        shown["recorded (Terminal-Bench)"] = read_trace(recorded).records
    data = {}
    for name, records in shown.items():
        tokens, seconds = _columns(records)
        data[name] = {
            "tokens": np.quantile(tokens, SHARES).tolist(),
            "seconds": np.quantile(seconds, SHARES).tolist(),
        }
    tokens, seconds = _columns(shown["synthetic"])
    return Measured(
        values={
            "tokens_mean_over_median": exactly(tokens.mean() / np.median(tokens)),
            "tokens_longest_over_median": exactly(tokens.max() / np.median(tokens)),
            "tool_mean_over_median": exactly(seconds.mean() / np.median(seconds)),
        },
        data=data,
    )


def _columns(records: tuple[TrajectoryRecord, ...]) -> tuple[Any, Any]:
    tokens = [sum(step.output_tokens or 0 for step in r.steps) for r in records]
    seconds = [s.tool_s for r in records for s in r.steps if s.tool_s]
    return np.array(tokens, float), np.array(seconds, float)


def draw(data: Any, path: Path) -> None:
    """Both distributions as the share that is larger, on logarithmic axes."""
    figure, axes = page(2)
    for index, (name, curves) in enumerate(data.items()):
        for ax, key in zip(axes, ("tokens", "seconds"), strict=True):
            ax.step(curves[key], 1.0 - SHARES, color=COLOURS[index], label=name, where="post")
    axes[0].set(xlabel="output tokens of a trajectory", ylabel="share that is longer")
    axes[1].set(xlabel="seconds of a tool call")
    for ax in axes:
        ax.set(xscale="log", yscale="log", ylim=(5e-3, 1.1))
    axes[0].set_title("Coding: tokens generated")
    axes[1].set_title("Coding: tool latency")
    axes[0].legend(loc="lower left")
    save(figure, path)
