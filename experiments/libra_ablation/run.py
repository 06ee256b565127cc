"""M: Libra's ablation: a planned split, TP degrees of several kinds, C-MLFQ, the elastic pool."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.loops import Loop, sized
from experiments.harness.values import exactly

SHARES = (8, 16, 24, 32)
"""GPUs of the trainer that are tried; the static split has the most, as Libra's shipped one."""
SMALL_SHARES = (4, 8)
MIXES = {"mixed TP": "heddle", "C-MLFQ": "libra-cmlfq"}


def _regime(config: Mapping[str, Any], pool: int = 0) -> str:
    return f"libra:pool_gpus={pool}:staleness.max_concurrent={config['loop']['at_once']}"


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """The split is planned on the lengths at the start; then these grow."""
    shared: dict[str, Any] = {
        "regimes": (_regime(config),),
        "workload": "coding",
        "gpu": "a100",
        "gpus": sized(size, 48, 12),
        "groups": 4,
        "steps": 32,
        "train_gpus": SHARES if size.full else SMALL_SHARES,
    }
    uniform = (2, 4, 8) if size.full else (2,)
    drifting = {**shared, "drift": config["loop"]["drift"]}
    pool = _regime(config, sized(size, 8, 4))
    loops = {
        "start": Loop(tps=uniform, **shared),
        "split": Loop(tps=uniform, **drifting),
        "elastic pool": Loop(tps=uniform, **{**drifting, "regimes": (pool,)}),
    }
    for name, policy in MIXES.items():
        loops[name] = Loop(policy=policy, tps=(2,), **drifting)
    return {name: loop.computation for name, loop in loops.items()}


def measure(context: Context) -> Measured:
    """Seconds of a step without a mechanism over those with it."""
    made = computations(context.size, context.config)
    step_s = {
        name: {(row["train_gpus"], row["tp"]): row["step_s"]["mean"] for row in rows["tried"]}
        for name, rows in ((name, context.store.get(each.key)) for name, each in made.items())
    }
    share, tp = planned = min(step_s["start"], key=lambda each: step_s["start"][each])
    pool = sized(context.size, 8, 4)
    found = {
        "static": step_s["split"][max(train for train, _ in step_s["split"]), tp],
        "split": step_s["split"][planned],
        # The pool is of the rollout's GPUs, and begins in training.
        "elastic pool": step_s["elastic pool"][max(share - pool, pool), tp],
        **{name: step_s[name][share, 2] for name in MIXES},
    }
    return Measured(
        values={
            "planner": exactly(found["static"] / found["split"]),
            "mixed": exactly(found["split"] / found["mixed TP"]),
            "cmlfq": exactly(found["split"] / found["C-MLFQ"]),
            "elastic": exactly(found["split"] / found["elastic pool"]),
        },
        data=found,
    )


def draw(data: Any, path: Path) -> None:
    """A bar for each row."""
    figure, ax = page(1, width=6.0)
    ax.bar(list(data), list(data.values()))
    ax.set(ylabel="seconds of a step")
    save(figure, path)
