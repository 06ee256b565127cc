"""N: RollArt: slow, failing environments, serverless rewards, and staleness of a trajectory."""

from collections.abc import Mapping
from typing import Any

from experiments.harness.drawing import ratio_bars
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.loops import Loop, by_regime, sized, step_s
from experiments.harness.values import exactly

PLAIN, REDUNDANT = "rollart", "rollart:redundant_environments=4"
ALPHAS = (1, 2, 4, 6)


def _alpha(alpha: int) -> str:
    return f"rollart:alpha={alpha}"


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """One for each cluster and service."""
    gpus, train = sized(size, 64, 16), sized(size, 16, 4)
    shared: dict[str, Any] = {
        "workload": config["loop"]["workload"],
        "gpus": gpus,
        "train_gpus": (train,),
        "groups": sized(size, 32, 8),
        "steps": 16,
    }
    # Four GPUs compute rewards, one at a time each; freed, they double the rollout's.
    freed = {**shared, "gpus": 8 + train}
    loops = {
        "alpha": Loop(regimes=tuple(_alpha(alpha) for alpha in ALPHAS), **shared),
        "slow": Loop(
            regimes=(PLAIN, REDUNDANT),
            options={"env_start_s": "100,100", "env_failure_rate": 0.05},
            **shared,
        ),
        "reward_gpus": Loop(
            regimes=("sync",),
            options={"reward_s": "2", "reward_gpus": 4, "reward_per_gpu": 1},
            **freed,
        ),
        "freed": Loop(
            regimes=("sync",), options={"reward_s": "2", "reward_cold_start_s": 4.2}, **freed
        ),
        "serverless": Loop(
            regimes=("sync",), options={"reward_s": "2", "reward_cold_start_s": 4.2}, **shared
        ),
        "reset": Loop(
            regimes=("sync",),
            options={"env_start_s": "200,150", "reward_s": "2"},
            **shared,
        ),
    }
    return {name: loop.computation for name, loop in loops.items()}


def measure(context: Context) -> Measured:
    """Ratios of the time of a step."""
    made = computations(context.size, context.config)
    rows = {name: context.store.get(each.key) for name, each in made.items()}
    alphas = [step_s(rows["alpha"], _alpha(alpha)) for alpha in ALPHAS]
    waits = {
        name: sum(by_regime(rows[name])["sync"]["split_s"][part] for part in ("rollout", "reward"))
        for name in ("freed", "reward_gpus")
    }
    values = {
        "alpha": alphas[0] / alphas[-1],
        "redundant": step_s(rows["slow"], PLAIN) / step_s(rows["slow"], REDUNDANT),
        "serverless": waits["freed"] / waits["reward_gpus"],
        "reset": step_s(rows["reset"], "sync") / step_s(rows["serverless"], "sync"),
    }
    return Measured(values={name: exactly(value) for name, value in values.items()}, data=values)


draw = ratio_bars
