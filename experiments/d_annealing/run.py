"""D: simulated annealing against the exact plan: how good, how long, and what it is worth."""

from pathlib import Path
from typing import Any

import heddle
from experiments.harness.drawing import COLOURS, bars, page, save, scaled
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Rollout
from experiments.harness.planned import Planned, plan
from experiments.harness.running import trace_of
from experiments.harness.values import across, estimate, exactly
from heddle.setup import Workspace
from heddle_core.solve.joint import Solver

WORKLOADS = ("coding", "search", "math")
SIMULATED = {
    "annealing": "experiments.harness.policies:annealed+oracle",
    "exact": "experiments.harness.policies:context_aware+oracle",
    "portfolio": "heddle+oracle",
}


def measure(context: Context) -> Measured:
    """Estimated makespans over the exact plan's for several seeds; simulated throughput."""
    seeds = context.config["plans"]["seeds"]
    cells = {workload: _plans(context, workload, seeds) for workload in WORKLOADS}
    found = context.results
    return Measured(
        values={
            "believed": across([estimate(cell["over_exact"]) for cell in cells.values()]),
            "seconds": across([exactly(c["exact_s"] / c["anneal_s"]) for c in cells.values()]),
            "simulated": across(
                [
                    found.gain(SIMULATED["exact"], SIMULATED["annealing"], workload=w)
                    for w in WORKLOADS
                ]
            ),
            "portfolio": across(
                [
                    found.gain(SIMULATED["portfolio"], SIMULATED["exact"], workload=w)
                    for w in WORKLOADS
                ]
            ),
        },
        data={
            "plans": cells,
            "throughput_tok_s": {
                w: {
                    name: found.estimate("throughput_tok_s", workload=w, policy=p).plain()
                    for name, p in SIMULATED.items()
                }
                for w in WORKLOADS
            },
        },
    )


def _plans(context: Context, workload: str, seeds: int) -> dict[str, Any]:
    gpus = context.size.gpus
    trace = trace_of(Rollout(workload=workload, trajectories=100 * gpus), context.store.folder)

    shared = Workspace()

    def planned(planner: Solver, seed: int) -> Planned:
        config = heddle.RunConfig(
            trace=str(trace), seed=seed, cluster=heddle.ClusterConfig(gpus=gpus)
        )
        return plan(config, planner=planner, predictor="oracle", workspace=shared)

    exact = planned("exact", 0)
    annealed = [planned("anneal", seed) for seed in range(seeds)]
    return {
        "over_exact": [a.solved.makespan_s / exact.solved.makespan_s for a in annealed],
        "exact_s": exact.solver_s,
        "anneal_s": sum(a.solver_s for a in annealed) / seeds,
    }


def draw(data: Any, path: Path) -> None:
    """Left what each seed of annealing finds, right what the plans are worth."""
    figure, axes = page(2, width=8.0)
    for index, workload in enumerate(WORKLOADS):
        over = data["plans"][workload]["over_exact"]
        worse = [100 * (value - 1) for value in over]
        axes[0].plot([index] * len(worse), worse, "o", color=COLOURS[1], alpha=0.7, ms=5)
    axes[0].axhline(0.0, color="#777777", lw=0.8)
    axes[0].set_xticks(range(3), WORKLOADS)
    axes[0].set(
        title="Annealing, a point for each seed",
        ylabel="estimated makespan over exact plan (%)",
        ylim=(-0.5, max(2.0, axes[0].get_ylim()[1])),
    )
    series = [
        (
            name,
            [scaled(data["throughput_tok_s"][w][name], 1e-3) for w in WORKLOADS],
            COLOURS[index],
        )
        for index, name in enumerate(("portfolio", "annealing", "exact"))
    ]
    bars(axes[1], WORKLOADS, series)
    axes[1].set(title="The plans, simulated", ylabel="output tokens per second (thousands)")
    axes[1].set_ylim(0, 1.25 * axes[1].get_ylim()[1])
    axes[1].legend(ncols=3)
    save(figure, path)
