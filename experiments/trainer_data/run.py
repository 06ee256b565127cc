"""X: places that samples or groups refill, and when a group's place is free."""

from collections.abc import Mapping
from typing import Any

from experiments.harness.drawing import ratio_bars
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.loops import Loop, by_regime, step_s
from experiments.harness.values import exactly

WINDOW = "areal:max_head_offpolicyness=2:max_concurrent_rollouts=128:batching.order=first_finished"
GROUPS, SAMPLES = (f"{WINDOW}:staleness.admits={each}" for each in ("groups", "samples"))


def _lagging(config: Mapping[str, Any]) -> tuple[str, str]:
    """A group's place is free as the group is complete, and as it is trained."""
    lag, loop = config["megatron"]["lag"], config["loop"]
    places = (lag + 1) * loop["groups"] * loop["samples"]
    mended = f"areal:max_head_offpolicyness={lag}:max_concurrent_rollouts={places}"
    mended += ":staleness.admits=groups:batching.order=first_finished"
    return f"{mended}:staleness.counted_by=nothing", mended


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """One for each source; the same at any size."""
    regimes = {"areal": (GROUPS, SAMPLES), "megatron": _lagging(config)}
    steps = {"areal": config["loop"]["steps"], "megatron": 4 * config["loop"]["steps"]}
    return {
        name: Loop(
            regimes=regimes[name],
            workload="coding",
            gpus=config[name]["gpus"],
            train_gpus=(config[name]["train_gpus"],),
            **{**config["loop"], "steps": steps[name]},
        ).computation
        for name in regimes
    }


def measure(context: Context) -> Measured:
    """Time over that of whole groups; oldest trajectories over the lag."""
    config = context.config
    made = computations(context.size, config)
    rows = {name: context.store.get(each.key) for name, each in made.items()}
    before, mended = (
        by_regime(rows["megatron"])[name]["staleness"]["mean"] / config["megatron"]["lag"]
        for name in _lagging(config)
    )
    values = {
        "refill": step_s(rows["areal"], SAMPLES) / step_s(rows["areal"], GROUPS),
        "unbounded": before / mended,
    }
    data = {**values, "lag before": before, "lag after": mended}
    return Measured(values={name: exactly(value) for name, value in values.items()}, data=data)


draw = ratio_bars
