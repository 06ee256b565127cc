"""M: Libra's ablation: a planned split, TP degrees of several kinds, C-MLFQ, the elastic pool."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.loops import Loop, by_regime, sized
from experiments.harness.values import exactly

FIXED = "libra:pool_gpus=0"


def _best(rows: Mapping[str, Any]) -> float:
    return max(float(row["tokens_per_s"]) for row in by_regime(rows).values())


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """Each mechanism is added to the planned split."""
    gpus = sized(size, 48, 12)
    shared: dict[str, Any] = {
        "workload": "coding",
        "gpu": "a100",
        "gpus": gpus,
        "groups": sized(size, 32, 8),
        "steps": sized(size, 16, 14),
        "drift": config["loop"]["drift"],
    }
    tried = tuple(sized(size, n, n // 4) for n in (8, 16, 24, 32))
    pool = f"libra:pool_gpus={sized(size, 8, 4)}"
    loops = {
        "static": Loop(regimes=(FIXED,), train_gpus=(gpus * 2 // 3,), tps=(2,), **shared),
        "split": Loop(regimes=(FIXED,), train_gpus=tried, tps=(2,), **shared),
        "mixed TP": Loop(regimes=(FIXED,), train_gpus=tried, policy="heddle", tps=(2,), **shared),
        "C-MLFQ": Loop(
            regimes=(FIXED,), train_gpus=tried, policy="libra-cmlfq", tps=(2,), **shared
        ),
        "elastic pool": Loop(regimes=(pool,), train_gpus=tried, tps=(2,), **shared),
    }
    return {name: loop.computation for name, loop in loops.items()}


def measure(context: Context) -> Measured:
    """Trained tokens a second with each mechanism over those without."""
    made = computations(context.size, context.config)
    rates = {name: _best(context.store.get(each.key)) for name, each in made.items()}
    return Measured(
        values={
            "planner": exactly(rates["split"] / rates["static"]),
            "mixed": exactly(rates["mixed TP"] / rates["split"]),
            "cmlfq": exactly(rates["C-MLFQ"] / rates["split"]),
            "elastic": exactly(rates["elastic pool"] / rates["split"]),
        },
        data=rates,
    )


def draw(data: Any, path: Path) -> None:
    """A bar for each row."""
    figure, ax = page(1, width=6.0)
    ax.bar(list(data), list(data.values()))
    ax.set(ylabel="trained tokens a second")
    save(figure, path)
