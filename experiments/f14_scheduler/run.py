"""F14: queues by length against other orders: rollout time and queueing of the longest."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import bars, colour, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import across, estimate

WORKLOADS = ("coding", "search", "math")
ORDERS = {
    "heddle": "longest first",
    "heddle+fcfs": "first come",
    "heddle+fcfs+round_robin": "round robin",
    "heddle+fcfs+autellix": "least attained",
    "heddle+fcfs+sjf": "shortest first",
}
PINNED = "verl+progressive_priority+paper_quality"
FEW = 32
"""Slots of an engine with a hundred trajectories."""


def measure(context: Context) -> Measured:
    """Throughput over each order, and how long the longest trajectory waited."""
    found = context.results

    def gain(order: str) -> Any:
        return across([found.gain("heddle", order, workload=w) for w in WORKLOADS])

    def few(order: str) -> Any:
        return across([found.gain(PINNED, order, workload=w, max_running=FEW) for w in WORKLOADS])

    queueing = {w: {p: _waited(context, p, w) for p in ORDERS} for w in WORKLOADS}
    ours = sum(queueing[w]["heddle"].mean for w in WORKLOADS)
    theirs = sum(queueing[w]["heddle+fcfs"].mean for w in WORKLOADS)
    return Measured(
        values={
            "over_fcfs": gain("heddle+fcfs"),
            "over_round_robin": gain("heddle+fcfs+round_robin"),
            "over_autellix": gain("heddle+fcfs+autellix"),
            "over_sjf": gain("heddle+fcfs+sjf"),
            "pinned_over_fcfs": few("verl"),
            "pinned_over_round_robin": few("verl+round_robin"),
            "pinned_over_autellix": few("verl+autellix"),
            "queueing_of_longest": estimate([ours / max(theirs, 1e-9)]),
        },
        data={
            "queueing_s": {w: {p: v.plain() for p, v in q.items()} for w, q in queueing.items()},
            "makespan_s": {
                w: {p: found.estimate("makespan_s", policy=p, workload=w).plain() for p in ORDERS}
                for w in WORKLOADS
            },
        },
    )


def _waited(context: Context, policy: str, workload: str) -> Any:
    rows = context.results.rows(policy=policy, workload=workload)
    return estimate([r["longest"]["queueing_s"] + r["longest"]["engine_queued_s"] for r in rows])


def draw(data: Any, path: Path) -> None:
    """Left the makespan, right the queueing of the longest trajectory."""
    figure, axes = page(2, width=8.0)
    for ax, key, name in zip(
        axes,
        ("makespan_s", "queueing_s"),
        ("Rollout time", "Queueing of the longest trajectory"),
        strict=True,
    ):
        series = [
            (label, [data[key][w][p] for w in WORKLOADS], colour(p)) for p, label in ORDERS.items()
        ]
        bars(ax, WORKLOADS, series)
        ax.set(title=name, ylabel="seconds", ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    save(figure, path)
