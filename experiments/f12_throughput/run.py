"""F12: throughput on three tasks and three models, against the baselines and the bound.

The baselines run in the paper's setting and at every other uniform TP degree.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from experiments.harness.drawing import bars, colour, page, save, scaled
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import BASELINE_TP
from experiments.harness.values import Results, Value, across, estimate, exactly

WORKLOADS = ("coding", "search", "math")
MODELS = ("qwen3-8b", "qwen3-14b", "qwen3-32b")
BASELINES = ("verl", "verl-affinity", "verl-star", "slime")
TPS = (1, 2, 4, 8)
QUALITY = "heddle-paper+paper_quality"
"""The paper's parts with a predictor as good as the paper's; it is an oracle with errors."""
SHOWN = ("verl", "verl-affinity", "slime", "heddle-paper", QUALITY, "heddle", "heddle+oracle")
SHADES = {QUALITY: colour("heddle+fixed+keep_engines")}
"""Else it would have the colour of `verl-affinity`."""
PUBLISHED = (1.4, 2.3)
"""Throughput over verl in the paper's nine cells."""


@dataclass(frozen=True, slots=True)
class TunedCell:
    """A cell with its baselines at their best uniform TP degree: the least mean makespan."""

    cell: Mapping[str, Any]
    tps: Mapping[str, int]
    best: str
    """The baseline that is fastest there."""

    def axes(self, baseline: str) -> dict[str, Any]:
        """Those of the baseline's runs at its best degree."""
        return {**self.cell, "policy": baseline, "tp": self.tps[baseline]}

    def gain(self, found: Results, policy: str, baseline: str) -> Value:
        """Throughput of a policy that plans its engines over a baseline's at its best degree."""
        return found.ratio("throughput_tok_s", {**self.cell, "policy": policy}, self.axes(baseline))

    def plain(self, found: Results, baseline: str) -> dict[str, Any]:
        """As JSON: the degree, the throughput there, and the gain of `heddle` over it."""
        return {
            "tp": self.tps[baseline],
            "throughput_tok_s": found.estimate("throughput_tok_s", **self.axes(baseline)).plain(),
            "heddle_over": self.gain(found, "heddle", baseline).plain(),
        }


def _tuned(found: Results, cell: Mapping[str, Any]) -> TunedCell:
    def mean_s(baseline: str, tp: int) -> float:
        axes = {**cell, "policy": baseline, "tp": tp}
        return found.estimate("makespan_s", **axes).mean

    held = [tp for tp in TPS if tp >= BASELINE_TP[cell["model"]]]
    tps = {b: min(held, key=partial(mean_s, b)) for b in BASELINES}
    return TunedCell(cell, tps, min(BASELINES, key=lambda b: mean_s(b, tps[b])))


def measure(context: Context) -> Measured:
    """Ratios paired by rollout, for each cell; the share of the bound."""
    found = context.results
    cells = [{"workload": w, "model": m, "tp": BASELINE_TP[m]} for w in WORKLOADS for m in MODELS]
    tuned = [_tuned(found, cell) for cell in cells]

    def over(policy: str, baseline: str, chosen: list[dict[str, Any]] = cells) -> Value:
        return across([found.gain(policy, baseline, **cell) for cell in chosen])

    values = {
        "tuned_over_best": across([at.gain(found, "heddle", at.best) for at in tuned]),
        "tuned_paper_over_best": across([at.gain(found, "heddle-paper", at.best) for at in tuned]),
        "tuned_quality_over_best": across([at.gain(found, QUALITY, at.best) for at in tuned]),
        "tuned_cells": exactly(sum(at.gain(found, "heddle", at.best).mean > 1.0 for at in tuned)),
    }
    for b in BASELINES:
        values[f"tuned_over_{_id(b)}"] = across([at.gain(found, "heddle", b) for at in tuned])
    values |= {f"over_{_id(b)}": over("heddle", b) for b in BASELINES}
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
    models = [[c for c in cells if c["model"] == m] for m in ("qwen3-8b", "qwen3-32b")]
    values["gain_32b_over_8b"] = across(
        [
            _times(found.gain("heddle", "verl", **large), found.gain("heddle", "verl", **small))
            for small, large in zip(*models, strict=True)
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
            "best_baseline": at.best,
            "at_best_tp": {b: at.plain(found, b) for b in BASELINES},
        }
        for cell, at in zip(cells, tuned, strict=True)
    ]
    return Measured(values=values, data={"cells": table})


def _id(policy: str) -> str:
    return policy.replace("-", "_")


def _published(context: Context, cell: dict[str, Any]) -> bool:
    """Whether the published quality has the published gain over one of the two verls."""
    gains = [context.results.gain(QUALITY, b, **cell).mean for b in ("verl", "verl-affinity")]
    return any(PUBLISHED[0] <= gain <= PUBLISHED[1] for gain in gains)


def _times(a: Value, b: Value) -> Value:
    return estimate([a.mean / b.mean])


def _bound(context: Context, policy: str, cell: dict[str, Any]) -> Value:
    rows = context.results.rows(policy=policy, **cell)
    return estimate([row["bound_s"] / row["makespan_s"] for row in rows])


def draw(data: Any, path: Path) -> None:
    """A panel for each task: above baselines at their best TP degree, below as in the paper."""
    figure, axes = page(3, 2, width=10.0, height=5.8, sharey="col")
    for ax, (tuned, workload) in zip(axes.flat, product((True, False), WORKLOADS), strict=True):
        cells = [cell for cell in data["cells"] if cell["workload"] == workload]
        series = [
            (
                p,
                [scaled(_shown(c, p, tuned=tuned), 1e-3) for c in cells],
                SHADES.get(p, colour(p)),
            )
            for p in SHOWN
        ]
        bars(ax, [c["model"].removeprefix("qwen3-").upper() for c in cells], series)
        setting = "baselines at their best TP" if tuned else "baselines at TP 1 (32B: 2)"
        ax.set(title=f"{workload}, {setting}", xlabel="" if tuned else "Qwen3")
    for row in axes:
        row[0].set_ylabel("1,000 output tokens per s")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, path)


def _shown(cell: dict[str, Any], policy: str, *, tuned: bool) -> dict[str, float]:
    """Throughput of a policy in a panel; those that plan their engines have but one."""
    if tuned and policy in cell["at_best_tp"]:
        return dict(cell["at_best_tp"][policy]["throughput_tok_s"])
    return dict(cell["throughput_tok_s"][policy])
