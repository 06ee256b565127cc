"""F6: what a token of a long trajectory takes when it shares engines with short ones."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import colour, page, save
from experiments.harness.examples import example_run
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import exactly
from heddle.cluster_profiles import load_profiles


def measure(context: Context) -> Measured:
    """Time per token of the longest trajectories under each policy, and alone on one GPU."""
    example = context.config["example"]
    mean_ms, data = {}, {}
    for policy in example["policies"]:
        with example_run(example, context.store, policy) as run:
            totals = run.trajectories.to_pandas().set_index("trajectory")["output_tokens"]
            steps = run.steps.to_pandas()
            cluster = run.config.cluster
        steps["trajectory"] = steps["trajectory"].astype(str)
        long = totals.sort_values(ascending=False).index[: example["longest"]].astype(str)
        mine = steps[steps["trajectory"].isin(long)]
        mean_ms[policy] = 1e3 * mine["decode_s"].sum() / mine["output_tokens"].sum()
        one = mine[(mine["trajectory"] == long[0]) & (mine["output_tokens"] >= 16)]
        made = one["output_tokens"].cumsum()
        data[policy] = {
            "tokens": made.tolist(),
            "tpot_ms": (1e3 * one["decode_s"] / (one["output_tokens"] - 1)).tolist(),
        }
        if policy == "slime":
            middle = one["prompt_tokens"] + one["output_tokens"] / 2
            alone = load_profiles(cluster).solo_tpot()
            solo = alone(cluster.gpu, 1, middle.to_numpy(float))
            data["alone"] = {"tokens": made.tolist(), "tpot_ms": (1e3 * solo).tolist()}
    alone = float(np.mean(data["alone"]["tpot_ms"]))
    return Measured(
        values={
            "shared_over_alone": exactly(mean_ms["slime"] / alone),
            "shared_over_heddle": exactly(mean_ms["slime"] / mean_ms["heddle+oracle"]),
        },
        data=data,
    )


def draw(data: Any, path: Path) -> None:
    """Time per token along the longest trajectory."""
    figure, axes = page()
    names = {
        "slime": "least-loaded engine at every step",
        "heddle+oracle": "with its like, on a wide engine",
        "alone": "alone on one GPU",
    }
    for policy, curve in data.items():
        shade = "#444444" if policy == "alone" else colour(policy)
        style = "--" if policy == "alone" else "-"
        axes.step(
            curve["tokens"], curve["tpot_ms"], style, color=shade, label=names[policy], where="mid"
        )
    axes.set(
        title="The longest of 800 coding trajectories, Qwen3-14B on 8 H100",
        xlabel="output tokens made so far",
        ylabel="time per output token (ms)",
        ylim=(0, None),
        xlim=(0, None),
    )
    axes.legend()
    save(figure, path)
