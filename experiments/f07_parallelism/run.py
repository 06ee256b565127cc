"""F7: eight GPUs as 8 x 1, 4 x 2, 2 x 4 and 1 x 8: time per token against throughput."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import COLOURS, MARKERS, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import exactly
from heddle_sim.profile_files import load_profile


def measure(context: Context) -> Measured:
    """Latency and throughput by sequences in all, as far as the KV of the engines goes."""
    settings = context.config["profile"]
    profile = load_profile(settings["model"], settings["gpu"])
    data = {}
    for tp in (1, 2, 4, 8):
        table, engines = profile.table(tp), settings["gpus"] // tp
        points = []
        for batch in settings["batches"]:
            held = batch * settings["context_tokens"]
            if held > table.kv_capacity_tokens:
                break
            seconds = table.base_s[batch] + table.per_context_s[batch] * held
            points.append([1e3 * seconds, engines * batch / seconds, engines * batch])
        data[f"{engines} x {tp}"] = points
    alone = {name: points[0][0] for name, points in data.items()}
    best = {name: max(p[1] for p in points) for name, points in data.items()}
    return Measured(
        values={
            "latency_alone": exactly(alone["1 x 8"] / alone["8 x 1"]),
            "throughput_most": exactly(best["1 x 8"] / best["8 x 1"]),
            "throughput_of_64": exactly(_at(data["1 x 8"], 64) / _at(data["8 x 1"], 64)),
        },
        data={"curves": data, "best": best, "context_tokens": settings["context_tokens"]},
    )


def _at(points: list[list[float]], sequences: float) -> float:
    """Throughput with that many sequences on all engines together."""
    return next(p[1] for p in points if p[2] == sequences)


def draw(data: Any, path: Path) -> None:
    """A curve for each layout; along it the batch grows."""
    figure, axes = page(height=3.4)
    for index, (name, points) in enumerate(data["curves"].items()):
        axes.plot(
            [p[0] for p in points],
            [p[1] / 1e3 for p in points],
            marker=MARKERS[index],
            ms=4.5,
            color=COLOURS[index],
            label=name.replace("x", "x TP"),
        )
    axes.set(
        title=f"Qwen3-14B on 8 H100, {data['context_tokens']:,} tokens of context each",
        xlabel="time per output token (ms)",
        ylabel="output tokens per second (thousands)",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.legend()
    save(figure, path)
