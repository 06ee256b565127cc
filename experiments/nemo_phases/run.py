"""P: phases of a synchronous step beside those that NeMo-RL measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.loops import Lengths, Loop, by_regime
from experiments.harness.values import exactly

SWITCH = "sleep and wake"
"""Of the engines, which the source does not list."""
PHASES = ("rollout", "training", "update", SWITCH)


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """One loop for each row of the source's table: its size is what it is."""
    return {
        name: Loop(
            regimes=("sync",),
            workload=Lengths(mean=row["mean"], most=row["most"], prompt=row["prompt"]),
            model=row["model"],
            gpus=row["gpus"],
            tps=(row["tp"],),
            colocated=True,
            groups=128,
            steps=4,
            options={
                "optimizer_steps": 4,
                "logprob_passes": 2,
                "train_backend": row["backend"],
                "colocated_speed": 1.0,  # the source's own phases are what training is fitted on
            },
        ).computation
        for name, row in config.items()
    }


def measure(context: Context) -> Measured:
    """Seconds of each phase and of the step."""
    data: dict[str, dict[str, float]] = {}
    for name, made in computations(context.size, context.config).items():
        row = by_regime(context.store.get(made.key))["sync"]
        split = row["split_s"]
        update_s = float(row["update_s"])
        data[name] = {
            "rollout": float(split["rollout"]),
            "training": float(split["training"]),
            "update": update_s,
            SWITCH: float(split["update"]) - update_s,
        }
    values = {
        f"{name}_{phase}": exactly(seconds)
        for name, row in data.items()
        for phase, seconds in {**row, "step": sum(row.values())}.items()
        if phase != SWITCH
    }
    return Measured(values=values, data=data)


def draw(data: Any, path: Path) -> None:
    """A stacked bar for each row of the table."""
    figure, ax = page(1, width=6.0)
    left = [0.0] * len(data)
    for phase in PHASES:
        seconds = [row[phase] for row in data.values()]
        ax.barh(list(data), seconds, left=left, label=phase)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    ax.set(xlabel="seconds of a step")
    ax.legend()
    save(figure, path)
