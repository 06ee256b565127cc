"""F11: engines of one TP degree against a mix, the same rollout on eight GPUs."""

from pathlib import Path
from typing import Any

from experiments.lib.drawing import COLOURS, bars, page, save
from experiments.lib.experiment import Context, Measured
from experiments.lib.values import estimate

UNIFORM, MIXED = "heddle-no-plan+oracle", "heddle+oracle"


def measure(context: Context) -> Measured:
    """Makespans, and the throughput of the mix over that of the best uniform layout."""
    found = context.results
    by_tp = {tp: found.estimate("makespan_s", policy=UNIFORM, tp=tp) for tp in (1, 2, 4, 8)}
    mixed = found.rows(policy=MIXED)
    uniform = [found.rows(policy=UNIFORM, tp=tp) for tp in by_tp]
    gain = [
        min(rows[seed]["makespan_s"] for rows in uniform) / mixed[seed]["makespan_s"]
        for seed in range(len(mixed))
    ]
    return Measured(
        values={"over_best_uniform": estimate(gain)},
        data={
            "makespan_s": {f"{8 // tp} x {tp}": v.plain() for tp, v in by_tp.items()}
            | {"mixed": found.estimate("makespan_s", policy=MIXED).plain()},
            "mixes": [row["tps"] for row in mixed],
        },
    )


def draw(data: Any, path: Path) -> None:
    """A bar for each layout."""
    figure, axes = page(height=3.0)
    names = list(data["makespan_s"])
    mixes = "; ".join(" + ".join(map(str, mix)) for mix in data["mixes"])
    values = list(data["makespan_s"].values())
    bars(axes, names, [("", values, COLOURS[0])], numbers=False)
    for x, value in enumerate(values):
        axes.annotate(f"{value['mean']:.0f} s", (x, 3), ha="center", color="white", fontsize=8.5)
    axes.set(
        title="320 coding trajectories, Qwen3-14B on 8 H100, lengths known",
        xlabel=f"engines x TP degree. The mixes of three rollouts: {mixes}",
        ylabel="makespan (s)",
    )
    save(figure, path)
