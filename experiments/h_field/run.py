"""H: numbers that users reported, in direction."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import COLOURS, bars, page, save, scaled
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import Value, estimate

MODERATE, HIGH = 1200.0, 400.0
"""Seconds over which groups arrive."""
HASH, LEAST = "verl+consistent_hash", "verl+sticky_least_sessions"
TIGHT = "experiments.harness.policies:cache_aware_tight"
LOOSE = "experiments.harness.policies:cache_aware_loose"
SESSIONS = {
    "slime": "least load\nat every step",
    TIGHT: "cache-aware\n4 / 1.1",
    LOOSE: "cache-aware\n32 / 1.5",
    "slime-2026": "cache-aware\n64 / 1.5",
    HASH: "consistent\nhash",
    "verl": "pinned",
}


def measure(context: Context) -> Measured:
    """The changes that threads report, as ratios after over before."""
    found = context.results

    def group(over_s: float, quantile: int) -> Value:
        after = found.rows(policy=LEAST, arrive_over_s=over_s, workload="coding")
        before = found.rows(policy=HASH, arrive_over_s=over_s, workload="coding")
        return estimate(
            [
                a["group_completion_s"][quantile] / b["group_completion_s"][quantile]
                for a, b in zip(after, before, strict=True)
            ]
        )

    def ratio(figure: str, after: str, before: str) -> Value:
        return found.ratio(figure, {"policy": after}, {"policy": before}, workload="sessions")

    return Measured(
        values={
            "skyrl_moderate_p90": group(MODERATE, 90),
            "skyrl_moderate_max": group(MODERATE, 100),
            "skyrl_high_p50": group(HIGH, 50),
            "skyrl_high_max": group(HIGH, 100),
            "gym_2570_makespan": ratio("makespan_s", "slime-2026", HASH),
            "gym_2570_hit": ratio("prefix_hit", "slime-2026", HASH),
            "srt_236_hit": ratio("prefix_hit", "verl", "slime"),
            "srt_236_throughput": ratio("throughput_tok_s", "verl", "slime"),
            "gym_3345_hit": ratio("prefix_hit", LOOSE, TIGHT),
            "gym_3345_throughput": ratio("throughput_tok_s", LOOSE, TIGHT),
        },
        data={
            policy: {
                figure: found.estimate(figure, policy=policy, workload="sessions").plain()
                for figure in ("throughput_tok_s", "prefix_hit")
            }
            for policy in SESSIONS
        },
    )


def draw(data: Any, path: Path) -> None:
    """610 sessions on 12 engines: throughput and hits by router."""
    figure, axes = page(1, 2, width=7.4, height=4.6, sharex=True)
    for ax, key, scale, name in (
        (axes[0], "throughput_tok_s", 1e3, "output tokens per\nsecond (thousands)"),
        (axes[1], "prefix_hit", 0.01, "prompt tokens found\nin prefix cache (%)"),
    ):
        values = [scaled(data[p][key], 1 / scale) for p in SESSIONS]
        bars(ax, list(SESSIONS.values()), [("", values, COLOURS[0])], numbers=True)
        ax.set_ylabel(name)
        ax.margins(y=0.15)
    axes[0].set_title("610 coding sessions on 12 engines, by router")
    save(figure, path)
