"""F12: throughput on three tasks and three models, against the baselines and the bound."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import bars, colour, page, save, scaled
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import Value, across, estimate

WORKLOADS = ("coding", "search", "math")
MODELS = ("qwen3-8b", "qwen3-14b", "qwen3-32b")
BASELINES = ("verl", "verl-star", "slime")
SHOWN = ("verl", "slime", "heddle-paper", "heddle", "heddle+oracle")


def measure(context: Context) -> Measured:
    """Ratios paired by rollout, for each cell; the share of the bound."""
    found = context.results
    cells = [{"workload": w, "model": m} for w in WORKLOADS for m in MODELS]
    values: dict[str, Value] = {
        f"over_{b.replace('-', '_')}": across([found.gain("heddle", b, **c) for c in cells])
        for b in BASELINES
    }
    values["paper_over_verl"] = across([found.gain("heddle-paper", "verl", **c) for c in cells])
    values["oracle_over_verl"] = across([found.gain("heddle+oracle", "verl", **c) for c in cells])
    for workload in WORKLOADS:
        values[f"slime_over_verl_{workload}"] = across(
            [found.gain("slime", "verl", workload=workload, model=m) for m in MODELS]
        )
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
            "throughput_tok_s": {
                p: found.estimate("throughput_tok_s", policy=p, **cell).plain() for p in SHOWN
            },
            "bound": {p: _bound(context, p, cell).plain() for p in ("heddle", "heddle+oracle")},
            "makespan_s": found.estimate("makespan_s", policy="heddle", **cell).plain(),
        }
        for cell in cells
    ]
    return Measured(values=values, data={"cells": table})


def _times(a: Value, b: Value) -> Value:
    return estimate([a.mean / b.mean])


def _bound(context: Context, policy: str, cell: dict[str, str]) -> Value:
    rows = context.results.rows(policy=policy, **cell)
    return estimate([row["bound_s"] / row["makespan_s"] for row in rows])


def draw(data: Any, path: Path) -> None:
    """A panel for each task; throughput in thousands of tokens per second."""
    figure, axes = page(3, width=9.0, height=3.1)
    for ax, workload in zip(axes, WORKLOADS, strict=True):
        cells = [cell for cell in data["cells"] if cell["workload"] == workload]
        series = [
            (p, [scaled(c["throughput_tok_s"][p], 1e-3) for c in cells], colour(p)) for p in SHOWN
        ]
        bars(ax, [c["model"].removeprefix("qwen3-").upper() for c in cells], series)
        ax.set(title=workload, xlabel="Qwen3")
    axes[0].set_ylabel("output tokens per second (thousands)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    save(figure, path)
