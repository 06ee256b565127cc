"""O: heddle-loop over regimes of its staleness bound, each at its best split and TP degree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.loops import Loop, sized, step_s
from experiments.harness.values import across, exactly

WORKLOADS = ("coding", "search", "math")
MODELS = ("qwen3-8b", "qwen3-14b", "qwen3-32b")
OURS = "heddle-loop"
SEPARATE = ("one-step-off", "areal:max_head_offpolicyness=1", "rollart", OURS)
COLOCATED = ("verl-colocate-async",)
"""Its mean staleness is as that of a bound of 1, which it does not state."""


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """Two for each workload and model: GPUs of their own, and common ones."""
    made: dict[str, Computation] = {}
    gpus = sized(size, 64, 16)
    shared: dict[str, Any] = {
        "gpus": gpus,
        "groups": sized(size, 32, 8),
        "steps": 12,
        "seed": config["loop"]["seed"],
    }
    splits = tuple(
        sorted({max(1, gpus * eighths // 8) for eighths in config["loop"]["eighths_train"]})
    )
    for workload in WORKLOADS:
        for model in MODELS:
            both = {**shared, "workload": workload, "model": model, "tps": None}
            apart = Loop(regimes=SEPARATE, train_gpus=splits, **both)
            common = Loop(regimes=COLOCATED, colocated=True, **both)
            made[f"{workload} {model}"] = apart.computation
            made[f"{workload} {model} colocated"] = common.computation
    return made


def measure(context: Context) -> Measured:
    """Step of the best other regime over ours, by cell."""
    made = computations(context.size, context.config)
    rows = {name: context.store.get(each.key) for name, each in made.items()}
    data: dict[str, dict[str, float]] = {}
    for workload in WORKLOADS:
        for model in MODELS:
            cell = f"{workload} {model}"
            steps = {name: step_s(rows[cell], name) for name in SEPARATE}
            common = rows[f"{cell} colocated"]
            steps |= {name: step_s(common, name) for name in COLOCATED}
            data[cell] = steps
    gains = [
        exactly(min(s for name, s in steps.items() if name != OURS) / steps[OURS])
        for steps in data.values()
    ]
    least = min(gain.mean for gain in gains)
    return Measured(values={"mean": across(gains), "least": exactly(least)}, data=data)


def draw(data: Any, path: Path) -> None:
    """Steps of each regime over ours, by cell."""
    figure, ax = page(1, width=9.0)
    names = [name for name in next(iter(data.values())) if name != OURS]
    for number, name in enumerate(names):
        at = [index + 0.2 * number for index in range(len(data))]
        ax.bar(at, [row[name] / row[OURS] for row in data.values()], width=0.2, label=name)
    ax.axhline(1.0, color="#777777", lw=0.8)
    ax.set_xticks(range(len(data)), list(data), rotation=30, ha="right")
    ax.set(ylabel="step over heddle-loop's")
    ax.legend()
    save(figure, path)
