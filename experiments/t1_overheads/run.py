"""T1: seconds of a tool call, of a prediction and of a migration."""

import time
from math import inf
from pathlib import Path
from typing import Any

from experiments.harness.drawing import COLOURS, bars, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import Value, across, exactly
from heddle.policy_inputs import SHIPPED, load_predictor_model
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.policy import TrajectoryView
from heddle_predict.corpus import source_of
from heddle_predict.evaluate import judge
from heddle_predict.learned import LearnedPredictor
from heddle_predict.play import Pace
from heddle_trace.schema import Trace
from heddle_trace.synth import synth

WORKLOADS = ("coding", "search", "math")
MODELS = ("qwen3-8b", "qwen3-14b", "qwen3-32b")
PAPER = {"coding": (0.41, 0.099, 0.27), "search": (1.41, 0.15, 0.15), "math": (0.046, 0.27, 0.25)}
"""Tool, prediction and migration of the paper's Table 1, 14B; drawn beside ours."""


class _Timed(LearnedPredictor):
    """The predictor of `heddle`, timed: one prediction per step, and all observations."""

    predictions, predict_s = 0, 0.0

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        began_s = time.perf_counter()
        super().observe_step(t, event)
        self.predict_s += time.perf_counter() - began_s

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        began_s = time.perf_counter()
        super().observe_tool(t, event)
        self.predict_s += time.perf_counter() - began_s

    def remaining_tokens(self, t: TrajectoryView) -> float:
        began_s = time.perf_counter()
        found = super().remaining_tokens(t)
        self.predict_s += time.perf_counter() - began_s
        self.predictions += 1
        return found


def measure(context: Context) -> Measured:
    """Mean of all tool calls and all migrations of a run; mean time of a prediction here."""
    found = context.results
    count = context.config["predictor"]["trajectories"]
    table = {}
    for workload in WORKLOADS:
        for model in MODELS:
            cell = {"workload": workload, "model": model}
            table[f"{workload} {model}"] = {
                "tool_s": found.estimate("tool_mean_s", **cell),
                "prediction_s": exactly(_prediction_s(workload, count)),
                "migration_s": found.estimate("migration_mean_s", **cell),
            }

    def of_14b(workload: str, what: str) -> Value:
        return table[f"{workload} qwen3-14b"][what]

    predictions = across([cell["prediction_s"] for cell in table.values()])
    return Measured(
        values={
            **{f"tool_{w}": of_14b(w, "tool_s") for w in WORKLOADS},
            "prediction": predictions,
            **{f"migration_{w}": of_14b(w, "migration_s") for w in WORKLOADS},
            "math_tool_over_migration": exactly(
                of_14b("math", "tool_s").mean / (of_14b("math", "migration_s").mean or inf)
            ),
        },
        data={
            cell: {name: value.plain() for name, value in row.items()}
            for cell, row in table.items()
        },
    )


def _prediction_s(workload: str, count: int) -> float:
    source = source_of(Trace(workload, synth(workload, count, 101), ""), workload)
    timed = _Timed(load_predictor_model(SHIPPED).model)
    judge(timed, source.scripts, Pace())
    return timed.predict_s / timed.predictions


def draw(data: Any, path: Path) -> None:
    """Ours and the paper's, 14B, on a logarithmic axis."""
    figure, axes = page(3, width=8.4, sharey=True)
    for ax, workload in zip(axes, WORKLOADS, strict=True):
        ours = data[f"{workload} qwen3-14b"]
        claimed = [{"mean": v, "low": v, "high": v} for v in PAPER[workload]]
        series = [("the paper", claimed, COLOURS[1]), ("here", list(ours.values()), COLOURS[0])]
        bars(ax, ["tool", "prediction", "migration"], series)
        ax.set(title=f"{workload}, Qwen3-14B", yscale="log", ylim=(1e-6, 10))
    axes[0].set_ylabel("seconds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, path)
