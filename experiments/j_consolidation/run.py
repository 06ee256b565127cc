"""J: engines that fall idle late in a rollout, merged to a higher TP degree for the stragglers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.harness.drawing import COLOURS, bars, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import Results, Value, across, estimate

WORKLOADS = ("coding", "search", "math")
MODELS = ("qwen3-8b", "qwen3-14b", "qwen3-32b")
BASES = ("heddle", "heddle+oracle")
STARTS = (5.0, 60.0)


def measure(context: Context) -> Measured:
    """Makespan without over with, by seconds that an engine takes to start."""
    found = context.results
    cells = [{"workload": w, "model": m} for w in WORKLOADS for m in MODELS]
    gains = {b: {s: [_gain(found, b, s, c) for c in cells] for s in STARTS} for b in BASES}
    rows = [_row(found, cell) for cell in cells]
    return Measured(
        values={
            "gain_start_5": across(gains["heddle"][5.0]),
            "gain_start_60": across(gains["heddle"][60.0]),
            "oracle_start_5": across(gains["heddle+oracle"][5.0]),
            "oracle_start_60": across(gains["heddle+oracle"][60.0]),
        },
        data={"cells": rows},
    )


def _gain(found: Results, base: str, start_s: float, cell: Mapping[str, str]) -> Value:
    """Throughput with consolidation over that without, paired by rollout."""
    merged = found.rows(policy=f"{base}+consolidate", engine_start_s=start_s, **cell)
    alone = found.rows(policy=base, **cell)
    tok_s = "throughput_tok_s"
    return estimate([a[tok_s] / b[tok_s] for a, b in zip(merged, alone, strict=True)])


def _row(found: Results, cell: Mapping[str, str]) -> dict[str, Any]:
    """One cell: gains, and in how many of its rollouts engines were merged."""
    row: dict[str, Any] = dict(cell)
    for base in BASES:
        without = sum(sum(r["tps"]) for r in found.rows(policy=base, **cell))
        row[base] = {
            f"{s:g}": {
                "gain": _gain(found, base, s, cell).plain(),
                "gpus_started_again": sum(
                    sum(r["tps"])
                    for r in found.rows(policy=f"{base}+consolidate", engine_start_s=s, **cell)
                )
                - without,
            }
            for s in STARTS
        }
    return row


def draw(data: Any, path: Path) -> None:
    """Left under `heddle`, right with lengths known; a group of bars for each cell."""
    figure, axes = page(2, width=9.0, height=3.1)
    cells = data["cells"]
    labels = [f"{c['workload']}\n{c['model'].removeprefix('qwen3-').upper()}" for c in cells]
    for ax, base in zip(axes, BASES, strict=True):
        series = [
            (f"start {s:g} s", [c[base][f"{s:g}"]["gain"] for c in cells], COLOURS[i])
            for i, s in enumerate(STARTS)
        ]
        bars(ax, labels, series)
        ax.axhline(1.0, color="#777777", lw=0.8)
        ax.tick_params(axis="x", labelsize=6)
        ax.set(title=base, ylim=(0.9, 1.1))
    axes[0].set_ylabel("throughput, with over without")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, path)
