"""The tables and the figure of `run.py`, from its `results.json`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

STEPS = ("0", "1", "2", "4", "8")
ORDER = (
    "none",
    "group",
    "history",
    "prefix tree",
    "progressive",
    "shipped",
    "trees",
    "sequence",
    "ceiling",
)
NAMES = {
    "tbench_mini": "tbench_mini",
    "tau2_retail": "tau2_retail",
    "tau_airline": "tau_airline",
    "mint": "mint",
    "hotpotqa_react": "hotpotqa_react",
    "cc_weka": "cc_weka",
    "coding": "synth coding",
    "search": "synth search",
    "math": "synth math",
}
PACE = "at once"
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)

TITLES = {"recall": "recall of the longest 20 %", "pearson": "Pearson with what remains"}

Results = Mapping[str, Any]
Cell = tuple[float, float, int]
"""Mean and standard deviation over seeds, and how many seeds have a figure."""


def over_seeds(results: Results, name: str, pace: str, predictor: str, step: str, key: str) -> Cell:
    """One figure of one predictor; seeds with too few trajectories for it are left out."""
    found = []
    for full, run in results.items():
        judged = run["paces"][pace].get(predictor) if full.split("/")[0] == name else None
        if judged and judged[step] is not None:
            found.append(judged[step][key])
    if not found:
        return math.nan, math.nan, 0
    return float(np.mean(found)), float(np.std(found)), len(found)


def tables(results: Results) -> str:
    """Write everything as Markdown."""
    names = [name for name in NAMES if any(full.split("/")[0] == name for full in results)]
    parts = [
        "# Prediction\n\nWritten by `python experiments/predictor/run.py`; "
        "[README.md](README.md) explains the columns. Means over seeds. `results.json` has all "
        "figures, step by step and also at 30 % at a time; `sharpening.png` shows them.\n"
    ]
    parts.append(_summary(results, names))
    parts.append(_calibration(results, names))
    parts.append(_data(results, names))
    return "\n".join(parts)


def _summary(results: Results, names: Sequence[str]) -> str:
    lines = [
        f"## After two steps, {PACE}\n",
        "Recall of the longest 20 % / Pearson with the remaining tokens; ± is the standard "
        "deviation of the trees' figures over seeds.\n",
        "| trace | " + " | ".join(ORDER) + " | ± |",
        "|---" * (len(ORDER) + 2) + "|",
    ]
    for name in names:
        cells = []
        for predictor in ORDER:
            recall = over_seeds(results, name, PACE, predictor, "2", "recall")
            pearson = over_seeds(results, name, PACE, predictor, "2", "pearson")
            cells.append(f"{recall[0]:.2f} / {pearson[0]:.2f}" if recall[2] else "-")
        recall = over_seeds(results, name, PACE, "trees", "2", "recall")
        pearson = over_seeds(results, name, PACE, "trees", "2", "pearson")
        cells.append(f"{recall[1]:.2f} / {pearson[1]:.2f}")
        lines.append(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _calibration(results: Results, names: Sequence[str]) -> str:
    lines = [
        f"## Calibration, {PACE}\n",
        "Share of the truths at or below each quantile, over the steps above; a column's head is "
        "the ideal share.\n",
        "| trace | model | " + " | ".join(f"{level:g}" for level in LEVELS) + " |",
        "|---" * (len(LEVELS) + 2) + "|",
    ]
    for name in names:
        for model in ("trees", "sequence"):
            shares = []
            for full, run in results.items():
                judged = run["paces"][PACE].get(model)
                if full.split("/")[0] == name and judged:
                    shares += [f["coverage"] for f in judged.values() if f is not None]
            if shares:
                cells = " | ".join(f"{share:.2f}" for share in np.mean(shares, axis=0))
                lines.append(f"| {NAMES[name]} | {model} | {cells} |")
    return "\n".join(lines) + "\n"


def _data(results: Results, names: Sequence[str]) -> str:
    lines = [
        "## Data\n",
        "Trajectories (groups) of one split. The variance of totals that a prompt alone decides "
        "limits Pearson before the first token to its square root.\n",
        "| trace | to fit on | to evaluate on | seeds | variance by prompt |",
        "|---" * 5 + "|",
    ]
    for name in names:
        runs = [run for full, run in results.items() if full.split("/")[0] == name]
        fitted, evaluated = (
            f"{trajectories:,} ({groups:,})"
            for trajectories, groups in zip(runs[0]["trajectories"], runs[0]["groups"], strict=True)
        )
        icc = runs[0]["icc"]
        share = "-" if icc is None else f"{icc:.0%}"
        lines.append(f"| {NAMES[name]} | {fitted} | {evaluated} | {len(runs)} | {share} |")
    return "\n".join(lines) + "\n"


def _panel(
    axis: Any,
    results: Results,
    name: str,
    pace: str,
    key: str,
    drawn: Mapping[str, tuple[str, str, str | None]],
) -> None:
    at = np.arange(len(STEPS))
    for predictor, (colour, line, marker) in drawn.items():
        cells = [over_seeds(results, name, pace, predictor, s, key) for s in STEPS]
        means = [cell[0] for cell in cells]
        look = {"color": colour, "marker": marker, "ms": 4, "lw": 1.6}
        axis.plot(at, means, line, label=predictor, **look)
        if predictor == "trees":
            spread = np.array([cell[1] for cell in cells])
            low, high = np.array(means) - spread, np.array(means) + spread
            axis.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)
    axis.axhline(0.8 if key == "recall" else 0.7, color="#bbbbbb", lw=0.8, ls="--")
    axis.set_xticks(at, STEPS)
    axis.tick_params(labelbottom=True, labelsize=8)
    axis.set_ylim((0.0, 1.0) if key == "recall" else (-0.4, 1.0))
    axis.spines[["top", "right"]].set_visible(False)


def figure(results: Results, path: Path, pace: str = PACE) -> None:
    """Draw recall and Pearson over steps, one panel for each trace (the paper's Figure 13)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in NAMES if any(full.split("/")[0] == name for full in results)]
    drawn = {
        "trees": ("#d1495b", "-", "o"),
        "sequence": ("#edae49", "-", "s"),
        "progressive": ("#30638e", "-", "^"),
        "prefix tree": ("#7a9e7e", "-", "v"),
        "history": ("#9c89b8", "-", "D"),
        "group": ("#8d99ae", "-", "x"),
        "ceiling": ("#222222", ":", None),
    }
    wide = 5
    blocks = -(-len(names) // wide)
    grid, axes = plt.subplots(
        2 * blocks, wide, figsize=(2.5 * wide, 4.9 * blocks), sharex=True, squeeze=False
    )
    for number, name in enumerate(names):
        block, column = divmod(number, wide)
        for row, key in enumerate(("recall", "pearson")):
            axis = axes[2 * block + row, column]
            _panel(axis, results, name, pace, key, drawn)
            if row == 0:
                axis.set_title(NAMES[name], fontsize=10)
            else:
                axis.set_xlabel("steps behind it", fontsize=8)
            if column == 0:
                axis.set_ylabel(TITLES[key], fontsize=8)
    for unused in range(len(names), blocks * wide):
        block, column = divmod(unused, wide)
        for row in range(2):
            axes[2 * block + row, column].set_axis_off()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    grid.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False, fontsize=9)
    grid.tight_layout(rect=(0, 0.06, 1, 1))
    grid.savefig(path, dpi=130)
