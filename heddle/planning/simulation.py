"""How long a plan takes: simulated under `heddle` with the plan's own planner."""

from collections.abc import Sequence
from dataclasses import replace

from heddle.comparison.tuning import with_policy, with_tps
from heddle.planning.plan import Planned
from heddle.setup import Workspace, prepare
from heddle.workload import Workload
from heddle_core.commands import Command
from heddle_core.events import Event, TrajectoryFinished
from heddle_core.parts.planner import SearchedPlan
from heddle_rollout.core import RecordedCore
from heddle_sim.rollout import simulate_rollout
from heddle_trace.table import Scripts


def replayed(planned: Planned, workspace: Workspace) -> Planned:
    """The plan with the makespan of its trace, whose lengths only an oracle's plan was made from.

    Raises:
        ValueError: one of the packages' errors for bad input.
    """
    scripts, _ = workspace.completed(planned.config)
    makespan_s = simulated_s(planned, scripts, planned.predictor, workspace)
    return replace(planned, replayed_s=makespan_s)


def simulated_s(planned: Planned, scripts: Scripts, predictor: str, workspace: Workspace) -> float:
    """Makespan of `scripts` in seconds under `heddle` with a predictor and the plan's planner."""
    config = planned.config
    workload = Workload(
        trace=planned.trace,
        scripts=scripts,
        trajectories=len(scripts),
        largest_tokens=planned.largest_tokens,
    )
    # With a TP degree of each class that a plan may have; the planner chooses.
    shapes = planned.problem.by_shape
    tps = [min(s.tp for s in shapes if s.gpu == gpu) for gpu in planned.profiles.pools]
    mine = with_policy(config, f"heddle+{predictor}", with_tps(config.cluster, tps))
    setup = prepare(mine, workspace=workspace, workload=workload)
    planner = SearchedPlan(setup.context, solver=planned.problem.solver, cost=planned.problem.cost)
    setup = replace(setup, policy=replace(setup.policy, planner=planner))
    end_s = 0.0

    def note(event: Event, commands: Sequence[Command]) -> None:
        nonlocal end_s
        if event.__class__ is TrajectoryFinished:
            end_s = event.time_s

    simulate_rollout(scripts, RecordedCore(setup.controller(), note), setup.simulation)
    return end_s
