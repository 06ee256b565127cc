"""F11: engines of one TP degree against a mix, the same rollout on eight GPUs."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import COLOURS, bars, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import estimate, exactly

TPS = (1, 2, 4, 8)
UNIFORM, MIXED = "heddle+fixed+keep_engines+oracle", "heddle+oracle"


def measure(context: Context) -> Measured:
    """Makespans, and the throughput of the mix over that of the best uniform layout."""
    found = context.results
    mixed = found.rows(policy=MIXED)
    uniform = [found.rows(policy=UNIFORM, tp=tp) for tp in TPS]
    gain = [
        min(rows[seed]["makespan_s"] for rows in uniform) / mixed[seed]["makespan_s"]
        for seed in range(len(mixed))
    ]
    over = {
        f"{8 // tp} x {tp}": found.ratio(
            "makespan_s", {"policy": UNIFORM, "tp": tp}, {"policy": MIXED}
        ).plain()
        for tp in TPS
    }
    return Measured(
        values={"over_best_uniform": estimate(gain)},
        data={
            "over_mixed": over | {"mixed": exactly(1.0).plain()},
            "makespan_s": found.estimate("makespan_s", policy=MIXED).mean,
            "mixes": [row["tps"] for row in mixed],
        },
    )


def draw(data: Any, path: Path) -> None:
    """A bar for each layout."""
    figure, axes = page(height=3.0)
    names = list(data["over_mixed"])
    mixes = "; ".join(" + ".join(map(str, mix)) for mix in data["mixes"])
    bars(axes, names, [("", list(data["over_mixed"].values()), COLOURS[0])])
    for x, value in enumerate(data["over_mixed"].values()):
        axes.annotate(f"{value['mean']:.2f}", (x, 0.05), ha="center", color="white", fontsize=9)
    axes.set(
        title="320 coding trajectories, Qwen3-14B on 8 H100, lengths known",
        xlabel=f"engines x TP degree. The mixes of three rollouts: {mixes}",
        ylabel=f"makespan over the mix's ({data['makespan_s']:.0f} s)",
    )
    save(figure, path)
