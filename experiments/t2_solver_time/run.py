"""T2: how long placement and the search for engines take."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import heddle
from experiments.harness.drawing import COLOURS, bars, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import BASELINE_TP, Rollout
from experiments.harness.planned import plan
from experiments.harness.running import trace_of
from experiments.harness.values import across, exactly
from heddle.setup import Workspace
from heddle_core.estimate.group_cost import work_of
from heddle_core.estimate.paper_cost import paper_costs
from heddle_core.solve.joint import JointProblem
from heddle_core.solve.presorted import aggregate_short, presorted_dp, search_partition

REPEATS = 3
NAMES = {
    "dp_s": "placement: recurrence",
    "search_s": "placement: search and fill",
    "anneal_s": "engines: annealing",
    "exact_s": "engines: exact",
    "portfolio_s": "engines: portfolio",
}


def measure(context: Context) -> Measured:
    """Best of three times of each solver on each cell, lengths known."""
    solvers = context.config["solvers"]
    which = "full" if context.size.full else "reduced"
    gpus, count = solvers["gpus"][which], solvers["trajectories"][which]
    cells = {
        f"{workload} {model}": _cell(context, workload, model, gpus, count)
        for workload in solvers["workloads"]
        for model in solvers["models"]
    }
    columns = {name: across([exactly(c[name]) for c in cells.values()]) for name in NAMES}
    return Measured(
        values={
            "placement": columns["dp_s"],
            "placement_by_search": columns["search_s"],
            "annealing": columns["anneal_s"],
            "exact": columns["exact_s"],
            "portfolio": columns["portfolio_s"],
        },
        data={"cells": cells, "gpus": gpus, "trajectories": count},
    )


def _cell(context: Context, workload: str, model: str, gpus: int, count: int) -> dict[str, float]:
    rollout = Rollout(workload=workload, trajectories=count // BASELINE_TP[model])
    config = heddle.RunConfig(
        trace=str(trace_of(rollout, context.store.folder)),
        cluster=heddle.ClusterConfig(model=model, gpus=gpus, tp=BASELINE_TP[model]),
    )
    planned = partial(plan, config, predictor="oracle", workspace=Workspace())
    annealed = planned(planner="anneal", cost="paper")
    exact = planned(planner="exact")
    best = planned(planner="portfolio")
    dp_s, search_s = _placement_s(annealed.problem, gpus)
    return {
        "dp_s": dp_s,
        "search_s": search_s,
        "anneal_s": annealed.solver_s,
        "exact_s": exact.solver_s,
        "portfolio_s": best.solver_s,
    }


def _placement_s(problem: JointProblem, gpus: int) -> tuple[float, float]:
    """Published cost, engines of the least TP degree, short ones in units of 16."""
    work = work_of(problem.output_tokens, context_tokens=np.array(problem.context_tokens))
    work = work.take(np.argsort(-work.output_tokens, kind="stable"))
    shape = min(problem.by_shape)
    cost = paper_costs(work, {shape: problem.by_shape[shape]}, max_running=problem.max_running)[
        shape
    ]
    engines = [cost] * (gpus // shape.tp)
    cuts = aggregate_short(work.output_tokens, below=10_000, unit=16)
    return (
        _best_s(lambda: presorted_dp(engines, cuts)),
        _best_s(lambda: search_partition(engines, len(work))),
    )


def _best_s(solve: Callable[[], Any]) -> float:
    taken = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        solve()
        taken.append(time.perf_counter() - began_s)
    return min(taken)


def draw(data: Any, path: Path) -> None:
    """Seconds on a logarithmic axis, and the paper's two lines."""
    figure, axes = page(height=3.2)
    cells = data["cells"].values()
    values = [across([exactly(c[name]) for c in cells]).plain() for name in NAMES]
    labels = [name.replace(": ", ":\n") for name in NAMES.values()]
    bars(axes, labels, [("", values, COLOURS[0])])
    axes.axhline(0.037, color=COLOURS[1], ls="--", label="the paper's placement, 0.037 s")
    axes.axhline(5.0, color=COLOURS[3], ls=":", label="the paper's resource manager, 5 s")
    axes.set(
        title=f"Solvers, up to {data['trajectories']:,} trajectories on {data['gpus']} GPUs",
        ylabel="seconds",
        yscale="log",
        ylim=(1e-4, 40),
    )
    axes.legend(loc="upper left")
    save(figure, path)
