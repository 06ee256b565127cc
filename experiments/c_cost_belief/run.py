"""C: plans by a cost of batch size alone against plans by a cost of contexts and KV."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import bars, colour, page, save, scaled
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import across

WORKLOADS = ("coding", "search", "math")
BATCH = "experiments.harness.policies:batch_only+oracle"
SIMULATED = "experiments.harness.policies:batch_simulated+oracle"
CONTEXT = "experiments.harness.policies:context_aware+oracle"
NAMES = {
    "verl": "verl, no plan",
    BATCH: "batch size alone, by group size",
    SIMULATED: "batch size alone, group simulated",
    CONTEXT: "contexts and KV",
}


def measure(context: Context) -> Measured:
    """The same exact planner and lengths under both costs; KV taken away by engines."""
    found = context.results
    gains = {w: found.gain(CONTEXT, BATCH, workload=w) for w in WORKLOADS}

    def recomputed(policy: str) -> float:
        rows = [r for w in WORKLOADS for r in found.rows(workload=w, policy=policy)]
        return float(sum(r["preemptions_engine"] for r in rows) / len(rows))

    return Measured(
        values={
            "context_over_batch": across(list(gains.values())),
            "simulated_over_batch": across(
                [found.gain(SIMULATED, BATCH, workload=w) for w in WORKLOADS]
            ),
            "batch_over_verl": across([found.gain(BATCH, "verl", workload=w) for w in WORKLOADS]),
        },
        data={
            "throughput_tok_s": {
                w: {
                    p: found.estimate("throughput_tok_s", workload=w, policy=p).plain()
                    for p in NAMES
                }
                for w in WORKLOADS
            },
            "recomputed": {p: recomputed(p) for p in NAMES},
            "tps": {p: found.rows(workload="coding", policy=p)[0]["tps"] for p in NAMES},
        },
    )


def draw(data: Any, path: Path) -> None:
    """Throughput by task."""
    figure, axes = page(height=3.0)
    series = [
        (name, [scaled(data["throughput_tok_s"][w][p], 1e-3) for w in WORKLOADS], colour(p))
        for p, name in NAMES.items()
    ]
    bars(axes, WORKLOADS, series)
    axes.set(
        title="An exact plan under two cost estimates, lengths known, Qwen3-14B",
        ylabel="output tokens per second (thousands)",
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, path)
