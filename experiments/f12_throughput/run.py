"""F12: throughput on three tasks and three models, against the baselines and the bound."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import bars, colour, page, save, scaled
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import Value, across, estimate, exactly

WORKLOADS = ("coding", "search", "math")
MODELS = ("qwen3-8b", "qwen3-14b", "qwen3-32b")
BASELINES = ("verl", "verl-affinity", "verl-star", "slime")
QUALITY = "heddle-paper+paper_quality"
"""The paper's parts with a predictor as good as the paper's; it is an oracle with errors."""
SHOWN = ("verl", "verl-affinity", "slime", "heddle-paper", QUALITY, "heddle", "heddle+oracle")
SHADES = {QUALITY: colour("heddle-no-plan")}
"""Else it would have the colour of `verl-affinity`."""
PUBLISHED = (1.4, 2.3)
"""Throughput over verl in the paper's nine cells."""


def measure(context: Context) -> Measured:
    """Ratios paired by rollout, for each cell; the share of the bound."""
    found = context.results
    cells = [{"workload": w, "model": m} for w in WORKLOADS for m in MODELS]

    def over(policy: str, baseline: str, chosen: list[dict[str, str]] = cells) -> Value:
        return across([found.gain(policy, baseline, **cell) for cell in chosen])

    values = {f"over_{_id(b)}": over("heddle", b) for b in BASELINES}
    values |= {f"paper_over_{_id(b)}": over("heddle-paper", b) for b in BASELINES}
    values |= {f"quality_over_{_id(b)}": over(QUALITY, b) for b in BASELINES}
    values["quality_cells"] = exactly(sum(_published(context, cell) for cell in cells))
    values["paper_over_verl_large"] = over(
        "heddle-paper", "verl", [c for c in cells if c["model"] != "qwen3-8b"]
    )
    values["oracle_over_verl"] = over("heddle+oracle", "verl")
    for workload in WORKLOADS:
        chosen = [c for c in cells if c["workload"] == workload]
        for verl in ("verl", "verl-affinity"):
            values[f"slime_over_{_id(verl)}_{workload}"] = over("slime", verl, chosen)
    values["gain_32b_over_8b"] = across(
        [
            _times(
                found.gain("heddle", "verl", workload=w, model="qwen3-32b"),
                found.gain("heddle", "verl", workload=w, model="qwen3-8b"),
            )
            for w in WORKLOADS
        ]
    )
    table = [
        {
            **cell,
            "over": {
                p: found.gain("heddle", p, **cell).plain() for p in (*BASELINES, "heddle-paper")
            },
            "paper_over": {
                p: {b: found.gain(p, b, **cell).plain() for b in BASELINES}
                for p in ("heddle-paper", QUALITY)
            },
            "throughput_tok_s": {
                p: found.estimate("throughput_tok_s", policy=p, **cell).plain() for p in SHOWN
            },
            "bound": {p: _bound(context, p, cell).plain() for p in ("heddle", "heddle+oracle")},
            "makespan_s": found.estimate("makespan_s", policy="heddle", **cell).plain(),
        }
        for cell in cells
    ]
    return Measured(values=values, data={"cells": table})


def _id(policy: str) -> str:
    return policy.replace("-", "_")


def _published(context: Context, cell: dict[str, str]) -> bool:
    """Whether the published quality has the published gain over one of the two verls."""
    gains = [context.results.gain(QUALITY, b, **cell).mean for b in ("verl", "verl-affinity")]
    return any(PUBLISHED[0] <= gain <= PUBLISHED[1] for gain in gains)


def _times(a: Value, b: Value) -> Value:
    return estimate([a.mean / b.mean])


def _bound(context: Context, policy: str, cell: dict[str, str]) -> Value:
    rows = context.results.rows(policy=policy, **cell)
    return estimate([row["bound_s"] / row["makespan_s"] for row in rows])


def draw(data: Any, path: Path) -> None:
    """A panel for each task; throughput in thousands of tokens per second."""
    figure, axes = page(3, width=10.0, height=3.4)
    for ax, workload in zip(axes, WORKLOADS, strict=True):
        cells = [cell for cell in data["cells"] if cell["workload"] == workload]
        series = [
            (
                p,
                [scaled(c["throughput_tok_s"][p], 1e-3) for c in cells],
                SHADES.get(p, colour(p)),
            )
            for p in SHOWN
        ]
        bars(ax, [c["model"].removeprefix("qwen3-").upper() for c in cells], series)
        ax.set(title=workload, xlabel="Qwen3")
    axes[0].set_ylabel("output tokens per second (thousands)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, path)
