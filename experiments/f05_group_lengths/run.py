"""F5: samples of one prompt differ in length, so that a prompt alone does not determine it."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.store import ROOT
from experiments.harness.values import exactly
from heddle_trace import read_trace, synth


def measure(context: Context) -> Measured:
    """Lengths by prompt and sample; how far samples of a prompt are apart."""
    trace = context.config["trace"]
    count = trace["groups"] * trace["samples"]
    records = synth(trace["workload"], count, trace["seed"], trace["samples"])
    grid = np.array([_tokens(r) for r in records]).reshape(trace["groups"], trace["samples"])
    grid = np.sort(grid, axis=1)[np.argsort(np.median(grid, axis=1))]
    apart = {"synthetic": float(np.median(grid[:, -1] / grid[:, 0]))}
    for path in trace["recorded"]:
        if (ROOT / path).exists():
            apart[Path(path).name.partition(".")[0]] = _apart(read_trace(ROOT / path).records)
    return Measured(
        values={"longest_over_shortest": exactly(apart["synthetic"])},
        data={"grid": grid.tolist(), "apart": apart},
    )


def _tokens(record: Any) -> int:
    return sum(step.output_tokens or 0 for step in record.steps)


def _apart(records: Any) -> float:
    """Median over groups of longest over shortest, groups of three or more."""
    groups: dict[str, list[int]] = {}
    for record in records:
        groups.setdefault(record.group_id, []).append(max(_tokens(record), 1))
    return float(np.median([max(g) / min(g) for g in groups.values() if len(g) >= 3]))


def draw(data: Any, path: Path) -> None:
    """A heat map, prompts by median, samples by length."""
    figure, axes = page(height=3.6)
    image = axes.imshow(
        np.log10(np.array(data["grid"]).T),
        aspect="auto",
        cmap="cividis",
        origin="lower",
        interpolation="nearest",
    )
    axes.grid(False)
    said = ", ".join(f"{name} {value:.1f}" for name, value in data["apart"].items())
    axes.set(
        title="Output tokens of 16 samples of 40 coding prompts",
        xlabel="prompt, in order of its median\n"
        f"longest over shortest: {said} (recorded: 3 to 5 samples)",
        ylabel="sample, in order of length",
    )
    bar = figure.colorbar(image, ax=axes, pad=0.01, ticks=[2.5, 3, 3.5, 4, 4.5])
    bar.ax.set_yticklabels(["316", "1k", "3.2k", "10k", "32k"])
    bar.set_label("output tokens")
    save(figure, path)
