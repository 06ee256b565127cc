"""O: heddle-loop over regimes of its staleness bound, each at its best split and TP degree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.loops import Loop, by_regime, sized
from experiments.harness.values import across, exactly

WORKLOADS = ("coding", "search", "math")
MODELS = ("qwen3-8b", "qwen3-14b", "qwen3-32b")
OURS = "heddle-loop"
SEPARATE = (
    "one-step-off",
    "areal:max_head_offpolicyness=1",
    "rollart",
    "verl-separate-async:parameter_sync_step=1",
)
COLOCATED = ("verl-colocate-async",)
"""Its mean staleness is as that of a bound of 1, which it does not state."""
OURS_BY_4 = f"{OURS}:max_head_offpolicyness=0.1:trigger_parameter_sync_step=4"
BY_4 = "verl-fully-async"
"""Both update every 4 batches, with a tenth of those between two updates ahead."""


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """Two for each workload and model: GPUs of their own, and common ones."""
    made: dict[str, Computation] = {}
    gpus = config["loop"]["gpus"]
    shared: dict[str, Any] = {
        "gpus": gpus,
        "groups": sized(size, gpus // 2, 8),
        "steps": 12,
        "seed": config["loop"]["seed"],
        "tps": tuple(config["loop"]["tps"]),
    }
    splits = tuple(gpus * eighths // 8 for eighths in config["loop"]["eighths_train"])
    for workload in WORKLOADS:
        for model in MODELS:
            both = {**shared, "workload": workload, "model": model}
            apart = Loop(regimes=(*SEPARATE, OURS, BY_4, OURS_BY_4), train_gpus=splits, **both)
            common = Loop(regimes=COLOCATED, colocated=True, **both)
            made[f"{workload} {model}"] = apart.computation
            made[f"{workload} {model} colocated"] = common.computation
    return made


def measure(context: Context) -> Measured:
    """Trained samples a second at equal data: ours over the best other's, by cell."""
    made = computations(context.size, context.config)
    rows = {name: by_regime(context.store.get(each.key)) for name, each in made.items()}
    data: dict[str, dict[str, float]] = {}
    for workload in WORKLOADS:
        for model in MODELS:
            cell = f"{workload} {model}"
            found = {**rows[cell], **rows[f"{cell} colocated"]}
            data[cell] = {name: row["equal_samples_per_s"] for name, row in found.items()}
    gains = [exactly(each[OURS] / _best(each)) for each in data.values()]
    by_4 = [exactly(each[OURS_BY_4] / each[BY_4]) for each in data.values()]
    least = min(gain.mean for gain in (*gains, *by_4))
    return Measured(
        values={"mean": across(gains), "by_4": across(by_4), "least": exactly(least)}, data=data
    )


def _best(rates: Mapping[str, float]) -> float:
    return max(rates[name] for name in (*SEPARATE, *COLOCATED))


def draw(data: Any, path: Path) -> None:
    """Ours over each regime of the same bound, by cell."""
    figure, ax = page(1, width=9.0)
    pairs = [*((name, OURS) for name in (*SEPARATE, *COLOCATED)), (BY_4, OURS_BY_4)]
    for number, (name, ours) in enumerate(pairs):
        at = [index + 0.13 * number for index in range(len(data))]
        ax.bar(at, [row[ours] / row[name] for row in data.values()], width=0.13, label=name)
    ax.axhline(1.0, color="#777777", lw=0.8)
    ax.set_xticks(range(len(data)), list(data), rotation=30, ha="right")
    ax.set(ylabel="samples/s of heddle-loop over it")
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, path)
