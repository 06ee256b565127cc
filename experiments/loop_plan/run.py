"""Q: the estimates of `heddle plan --loop` beside simulations of every setting."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.loops import Loop, sized
from experiments.harness.values import across, exactly

REGIMES = ("sync", "one-step-off", "areal:max_head_offpolicyness=1", "heddle-loop")


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """One for each workload."""
    settings = config["plan"]
    gpus = sized(size, 64, 16)
    return {
        workload: Loop(
            regimes=REGIMES,
            workload=workload,
            gpus=gpus,
            train_gpus=tuple(gpus * eighths // 8 for eighths in settings["eighths_train"]),
            tps=tuple(settings["tps"]),
            groups=sized(size, 32, 8),
            steps=12,
        ).plan_computation
        for workload in settings["workloads"]
    }


def measure(context: Context) -> Measured:
    """Errors of the estimates, and what the setting that they name first costs."""
    made = computations(context.size, context.config)
    rows = {name: context.store.get(each.key)["estimates"] for name, each in made.items()}
    errors = {
        name: [abs(r["estimated_step_s"] / r["simulated_step_s"] - 1.0) for r in each]
        for name, each in rows.items()
    }
    first = {
        name: each[0]["simulated_step_s"] / min(r["simulated_step_s"] for r in each)
        for name, each in rows.items()
    }
    return Measured(
        values={
            "error": across([exactly(median(each)) for each in errors.values()]),
            "worst": exactly(max(max(each) for each in errors.values())),
            "first": across([exactly(each) for each in first.values()]),
        },
        data={
            name: [[r["regime"], r["estimated_step_s"], r["simulated_step_s"]] for r in each]
            for name, each in rows.items()
        },
    )


def draw(data: Any, path: Path) -> None:
    """Estimated over simulated steps, by workload."""
    figure, axes = page(len(data), width=9.0)
    for ax, (name, rows) in zip(axes, data.items(), strict=True):
        for regime in REGIMES:
            mine = [row for row in rows if row[0] == regime]
            ax.plot([r[2] for r in mine], [r[1] for r in mine], "o", ms=3, label=regime)
        most = max(max(row[1:]) for row in rows)
        ax.plot([0, most], [0, most], color="#777777", lw=0.8)
        ax.set(title=name, xlabel="simulated step, s")
    axes[0].set(ylabel="estimated step, s")
    axes[0].legend(fontsize=6)
    save(figure, path)
