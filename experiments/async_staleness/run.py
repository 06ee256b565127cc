"""K: seconds of a step over the staleness that a regime allows: AReaL, verl fully async, marin."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.loops import Lengths, Loop, sized, step_s, verl_async, verl_regime
from experiments.harness.values import exactly

ETAS = (0, 1, 2, 4, 8)
THRESHOLDS = ("0", "0.1", "0.3", "0.5")
ALLOWANCES = (0, 1, 2, 4)


def _areal(eta: int) -> str:
    return f"areal:max_head_offpolicyness={eta}"


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """One for each source."""
    loops = {
        "areal": Loop(
            regimes=tuple(_areal(eta) for eta in ETAS),
            model="qwen3-8b",
            gpus=sized(size, 64, 16),
            train_gpus=(sized(size, 16, 4),),
            groups=sized(size, 128, 16),
            # The first measured batch of eta 8 is the tenth.
            steps=sized(size, 40, 14),
        ),
        "verl": verl_async(size, Lengths(**config["verl"]), THRESHOLDS),
        "marin": Loop(
            regimes=tuple(_areal(eta) for eta in ALLOWANCES),
            workload="coding",
            model="qwen3-8b",
            gpus=sized(size, 40, 12),
            train_gpus=(sized(size, 8, 4),),
            groups=sized(size, 64, 8),
        ),
    }
    return {name: loop.computation for name, loop in loops.items()}


def measure(context: Context) -> Measured:
    """Ratios to the step without staleness."""
    made = computations(context.size, context.config)
    rows = {name: context.store.get(each.key) for name, each in made.items()}
    areal = [step_s(rows["areal"], _areal(eta)) for eta in ETAS]
    verl = [step_s(rows["verl"], verl_regime(each)) for each in THRESHOLDS]
    marin = [step_s(rows["marin"], _areal(eta)) for eta in ALLOWANCES]
    return Measured(
        values={
            "areal_1": exactly(areal[0] / areal[1]),
            "areal_2": exactly(areal[0] / areal[2]),
            "areal_4": exactly(areal[0] / areal[3]),
            "areal_8_over_2": exactly(areal[2] / areal[4]),
            "verl_01": exactly(verl[1] / verl[0]),
            "verl_03": exactly(verl[2] / verl[0]),
            "verl_05": exactly(verl[3] / verl[0]),
            "marin_1": exactly(marin[1] / marin[0]),
            "marin_2": exactly(marin[2] / marin[0]),
            "marin_4": exactly(marin[3] / marin[0]),
        },
        data={"areal": areal, "verl": verl, "marin": marin},
    )


def draw(data: Any, path: Path) -> None:
    """A panel for each source."""
    figure, axes = page(3, width=9.0)
    shown: dict[str, tuple[str, Sequence[float | str]]] = {
        "areal": ("eta", ETAS),
        "verl": ("staleness threshold", THRESHOLDS),
        "marin": ("allowance", ALLOWANCES),
    }
    for ax, (name, (label, at)) in zip(axes, shown.items(), strict=True):
        ax.plot(at, data[name], marker="o")
        ax.set(title=name, xlabel=label, ylim=(0, None))
    axes[0].set(ylabel="seconds of a step")
    save(figure, path)
