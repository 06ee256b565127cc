"""B: a hundred trajectories of 40K tokens do not fit on an 80 GB engine."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import line, page, save, scaled
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import estimate, exactly
from heddle_sim.profile_files import load_profile

RUNNING = (25, 50, 100, 200)
LAYOUTS = {"qwen3-8b": 1, "qwen3-14b": 1, "qwen3-32b": 2}


def measure(context: Context) -> Measured:
    """Tokens that each of 100 has; throughput and recomputation by slots."""
    each = {
        model: load_profile(model, "h100").at(tp).kv_capacity_tokens / 100
        for model, tp in LAYOUTS.items()
    }
    found = context.results
    curves: dict[str, Any] = {}
    for gpu in ("h100", "h200"):
        for policy in ("verl", "heddle"):
            cells = [{"gpu": gpu, "policy": policy, "max_running": n} for n in RUNNING]
            curves[f"{policy}, {gpu.upper()}"] = {
                "tok_s": [found.estimate("throughput_tok_s", **c) for c in cells],
                "recomputed": [
                    estimate([r["preemptions_engine"] / r["steps"] for r in found.rows(**c)])
                    for c in cells
                ],
            }
    verl = curves["verl, H100"]["tok_s"]
    return Measured(
        values={
            **{f"tokens_{m.removeprefix('qwen3-')}": exactly(t) for m, t in each.items()},
            "verl_200_over_best": exactly(verl[-1].mean / max(v.mean for v in verl)),
            "recomputed_at_100": curves["verl, H100"]["recomputed"][2],
            "more_memory": exactly(curves["verl, H200"]["tok_s"][2].mean / verl[2].mean),
            "heddle_200_over_best": exactly(
                curves["heddle, H100"]["tok_s"][-1].mean
                / max(v.mean for v in curves["heddle, H100"]["tok_s"])
            ),
        },
        data={
            name: {key: [v.plain() for v in values] for key, values in curve.items()}
            for name, curve in curves.items()
        },
    )


def draw(data: Any, path: Path) -> None:
    """Left throughput, right recomputed steps, by slots."""
    figure, axes = page(2, width=8.0)
    for index, (name, curve) in enumerate(data.items()):
        tok_s = [scaled(v, 1e-3) for v in curve["tok_s"]]
        line(axes[0], RUNNING, tok_s, name, index)
        recomputed = [scaled(v, 100.0) for v in curve["recomputed"]]
        line(axes[1], RUNNING, recomputed, name, index)
    axes[0].set(
        title="Throughput, coding, Qwen3-14B",
        xlabel="steps that an engine may run",
        ylabel="output tokens per second (thousands)",
        ylim=(0, None),
    )
    axes[1].set(
        title="KV taken away and prefilled again",
        xlabel="steps that an engine may run",
        ylabel="recomputations per 100 steps",
    )
    for ax in axes:
        ax.set_xticks(RUNNING)
    axes[0].legend()
    save(figure, path)
