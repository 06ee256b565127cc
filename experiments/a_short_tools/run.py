"""A: math tools end before a prediction or a migration does; awaited or lost."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import line, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import Value, estimate

LATENCIES = (0.0, 0.05, 0.27, 1.0)
SCALES = (1.0, 6.0, 30.0)
TOOL_S = 0.046
SERVED = ("heddle-paper", "heddle-paper+served", "heddle-paper+paper_quality")
"""Predictions awaited, late ones lost, awaited with the published quality (an oracle)."""
SHOWN = ("slime", "heddle-paper", "heddle-paper+served", "heddle+never", "heddle")


def measure(context: Context) -> Measured:
    """Gain over verl, by latency of the service and by length of the tools."""
    found = context.results
    base = {"workload": "math"}
    verl = found.rows(policy="verl", tool_scale=1.0, **base)

    def served(policy: str, latency: float) -> Any:
        rows = found.rows(policy=policy, prediction_s=latency, tool_scale=1.0, **base)
        return _gain(rows, verl)

    def scaled(policy: str, scale: float) -> Any:
        rows = found.rows(policy=policy, prediction_s=None, tool_scale=scale, **base)
        under = found.rows(policy="verl", tool_scale=scale, **base)
        return _gain(rows, under)

    late = found.rows(policy="heddle-paper", prediction_s=0.27, tool_scale=1.0, **base)
    by_latency = {p: {str(s): served(p, s) for s in LATENCIES} for p in SERVED}
    awaited, lost, quality = by_latency.values()
    by_scale = {p: {str(k): scaled(p, k) for k in SCALES} for p in SHOWN}
    return Measured(
        values={
            "late": estimate([r["predictions_late"] / r["predictions"] for r in late]),
            "paper_with_service": awaited["0.27"],
            "quality_with_service": quality["0.27"],
            "late_ones_lost": lost["0.27"],
            "awaited_over_lost": _ratio(awaited["0.27"], lost["0.27"]),
            "service_over_none": _ratio(awaited["0.27"], awaited["0.0"]),
            "heddle_over_verl": by_scale["heddle"]["1.0"],
            "migration_is_worth": _ratio(
                by_scale["heddle"]["1.0"], by_scale["heddle+never"]["1.0"]
            ),
            "longer_tools": _ratio(
                by_scale["heddle-paper+served"]["30.0"], by_scale["heddle-paper+served"]["1.0"]
            ),
        },
        data={
            "by_latency": {p: {k: v.plain() for k, v in m.items()} for p, m in by_latency.items()},
            "by_scale": {p: {k: v.plain() for k, v in m.items()} for p, m in by_scale.items()},
        },
    )


def _gain(rows: Any, under: Any) -> Value:
    tok_s = "throughput_tok_s"
    return estimate([a[tok_s] / b[tok_s] for a, b in zip(rows, under, strict=True)])


def _ratio(a: Any, b: Any) -> Any:
    return estimate([a.mean / b.mean])


def draw(data: Any, path: Path) -> None:
    """Left by latency, right by tool seconds."""
    figure, axes = page(2, width=8.0)
    for index, policy in enumerate(SERVED):
        points = data["by_latency"][policy]
        line(axes[0], [float(k) for k in points], list(points.values()), policy, index)
    axes[0].set(title="Latency of the prediction service", xlabel="seconds for a prediction")
    for index, policy in enumerate(SHOWN):
        points = data["by_scale"][policy]
        line(axes[1], [TOOL_S * float(k) for k in points], list(points.values()), policy, index)
    axes[1].set(title="Length of the tools", xlabel="mean seconds of a tool call", xscale="log")
    axes[1].set_xticks([0.05, 0.3, 1.5], ["0.05", "0.3", "1.5"])
    axes[1].minorticks_off()
    for ax in axes:
        ax.axhline(1.0, color="#777777", lw=0.8)
        ax.set(ylabel="throughput over verl", ylim=(0, None))
    for ax in axes:
        ax.legend()
    save(figure, path)
